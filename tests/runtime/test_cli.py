import io
from dataclasses import fields
from pathlib import Path

import pytest
import tiny_models

from midstream.runtime import cli
from midstream.runtime.engine import Engine
from midstream.runtime.installation import own_version
from midstream.runtime.loading import load_model
from midstream.runtime.options import EngineConfig, meaning_of
from midstream.runtime.sampling import SamplingParams

ENGINE = ("--memory", "16MiB", "--max-rows", "2", "--device", "cpu")
GREEDY = ("--temperature", "0", "--max-tokens", "6")
STEM = "the same beginning of every turn, long enough to fill one block of a checkpoint "


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory) -> Path:
    """A checkpoint that reads and writes bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    tiny_models.build("bamba", vocab_size=260, tokenizer_class="bytes").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ids_model(tmp_path_factory) -> Path:
    """A checkpoint without any text interface."""
    folder = tmp_path_factory.mktemp("ids")
    tiny_models.build("qwen3_next").save_pretrained(folder)
    return folder


def generate(model: Path, *words: str) -> int:
    return cli.main(["generate", "--model", str(model), *ENGINE, *GREEDY, *words])


def engine_texts(folder: Path, *prompts: str) -> list[str]:
    model, tokenizer = load_model(folder, device="cpu")
    with Engine(model, tokenizer=tokenizer, memory="16MiB", max_rows=2) as engine:
        params = SamplingParams(max_tokens=6, temperature=0)
        return [output.text for output in engine.generate(prompts, params)]


def test_generate_prints_what_the_engine_answers(bytes_model, capsys):
    assert generate(bytes_model, "--prompt", "midstream") == 0
    assert capsys.readouterr().out == engine_texts(bytes_model, "midstream")[0] + "\n"


def test_several_answers_are_labelled_in_the_order_of_the_prompts(bytes_model, tmp_path, capsys):
    prompts = ("one", "two", "three")
    for name in prompts:
        (tmp_path / name).write_text(name)
    words = [word for name in prompts for word in ("--prompt-file", str(tmp_path / name))]
    assert generate(bytes_model, *words) == 0
    texts = engine_texts(bytes_model, *prompts)
    expected = "".join(f"[{i}] {text}\n" for i, text in enumerate(texts, start=1))
    assert capsys.readouterr().out == expected


def test_configuration_comes_first_and_numbers_last_on_stderr(bytes_model, capsys):
    generate(bytes_model, "--prompt", "midstream", "--kv-block", "32", "--hash-key", "ab" * 16)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("config: model=BambaForCausalLM dtype=float32 device=cpu ")
    assert " kv_block=32 " in lines[0]
    assert "hash_key=given" in lines[0]
    assert "ab" * 16 not in lines[0]
    assert lines[-3].startswith("6 tokens in ")
    assert lines[-3].endswith("0 of 9 prompt tokens reused")
    assert lines[-1].startswith("device cpu; 0 graph replays; fallbacks: ")


def test_an_emulated_device_and_a_prompt_of_one_token_are_told_as_they_are(
    ids_model, capsys, monkeypatch
):
    monkeypatch.setenv("MIDSTREAM_EMULATE", "late")
    assert generate(ids_model, "--token-ids", "5") == 0
    lines = capsys.readouterr().err.splitlines()
    assert " graphs=rows 1-2" in lines[0]
    assert "(emulated on the CPU, work done late)" in lines[0]
    assert lines[-2].startswith("cache: nothing to reuse in a prompt of one token")
    replays = int(lines[-1].partition("; ")[2].split()[0])
    assert replays > 0


@pytest.mark.parametrize("flag", ["--max-rows", "--max-step-tokens", "--num-kv-pages"])
def test_a_size_that_no_machine_holds_exits_with_2_and_one_message(ids_model, capsys, flag):
    assert generate(ids_model, "--token-ids", "5", flag, "1000000000") == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("midstream: Engine: ")
    assert "; expected " in error
    assert "; lower " in error


def test_token_ids_are_answered_with_token_ids(ids_model, capsys):
    assert generate(ids_model, "--token-ids", "5,6,7") == 0
    assert len([int(word) for word in capsys.readouterr().out.split()]) == 6


def test_a_chat_resumes_from_the_turns_before(bytes_model, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{STEM}\n\n{STEM}\n"))
    assert generate(bytes_model, "--chat") == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-3].startswith("12 tokens in ")
    reused = int(captured.err.splitlines()[-3].split("; ")[-1].split()[0])
    assert reused >= 64


def test_a_full_history_loses_its_oldest_questions_and_a_line_too_long_is_reported(
    bytes_model, capsys, monkeypatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{STEM}\n{STEM}\n{'y' * 400}\n{STEM}\n"))
    assert generate(bytes_model, "--chat", "--max-len", "200") == cli.FAILED
    captured = capsys.readouterr()
    assert captured.err.count("oldest questions dropped: 2") == 1
    assert captured.err.count("this line has no answer: Engine: the prompt has 401 tokens") == 1
    assert "\n18 tokens in " in captured.err


def test_a_line_that_is_no_text_is_reported_and_the_chat_goes_on(bytes_model, capsys, monkeypatch):
    lines = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\none\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", lines)
    assert generate(bytes_model, "--chat") == cli.FAILED
    err = capsys.readouterr().err
    assert "this line has no answer: ByteTokenizer: character 0 of the text" in err
    assert "\n6 tokens in " in err


def test_logprobs_are_printed_one_line_for_each_token(bytes_model, capsys):
    assert generate(bytes_model, "--prompt", "a", "--prompt", "b", "--logprobs", "2") == 0
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith(("[1] ", "[2] "))]
    assert len(lines) == 12
    assert all("; best: " in line for line in lines)


@pytest.mark.parametrize("inputs", [("--prompt", "text"), ("--chat",)], ids=" ".join)
def test_text_is_refused_where_the_model_has_no_tokenizer(ids_model, capsys, inputs):
    assert generate(ids_model, *inputs) == cli.REFUSED
    captured = capsys.readouterr()
    assert "give the prompt as ids: --token-ids 1,2,3" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--prompt", "a", "--state-block", "24"),
            "state_block=24 is not a multiple of kv_block=16",
        ),
        (("--prompt", "a", "--cache-mode", "some"), "expected one of 'none', 'align', 'all'"),
        (("--prompt", "a", "--top-p", "0"), "SamplingParams: top_p is 0"),
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt-file", "/no/such/file"), "cannot be read"),
        (("--token-ids", "1,x"), "expected numbers with commas between"),
        (("--token-ids", "1,999"), "expected 0 to 259"),
        (("--token-ids", f"1,{10**30}"), f"token ids from 1 to {10**30}; expected 0 to 259"),
        (("--prompt", "a", "--device", "meta"), "device='meta'; expected 'auto', 'cpu', 'cuda'"),
        (("--prompt", "a", "--memory", "1KiB"), "expected at least 4 and 2; set memory to "),
        (("--prompt", "a", "--prompt", ""), "prompt 2 of 2: Engine: the prompt is empty"),
        (("--prompt", "\udcff\udcfe"), "give bytes as token ids"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_refused_exits_with_2_and_one_message(bytes_model, capsys, words, message):
    assert generate(bytes_model, *words) == cli.REFUSED
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert last.startswith("midstream: ")
    assert message in last
    assert captured.out == ""


def test_a_wrong_folder_is_refused(tmp_path, capsys):
    assert generate(tmp_path, "--prompt", "a") == cli.REFUSED
    assert "no config.json" in capsys.readouterr().err


def test_an_interrupt_closes_the_engine_prints_the_numbers_and_exits_with_130(
    bytes_model, capsys, monkeypatch
):
    closed, steps, step, close = [], [], Engine.step, Engine.close

    def interrupted_step(engine):
        steps.append(engine)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return step(engine)

    def noted_close(engine):
        close(engine)
        closed.append(engine)

    monkeypatch.setattr(Engine, "step", interrupted_step)
    monkeypatch.setattr(Engine, "close", noted_close)
    assert generate(bytes_model, "--prompt", "midstream") == cli.INTERRUPTED
    assert closed == [steps[0]]
    err = capsys.readouterr().err
    assert "\n2 tokens in " in err
    assert err.endswith("\nmidstream: interrupted\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", "--prmpt", "a"), "unknown flag --prmpt; did you mean --prompt?"),
        (("generate", "--zzz"), "unknown flag --zzz"),
        (("generate", "--model", "m", "--prompt", "a", "b"), "'b' belongs to no flag"),
        (("generate", "--prompt", "a"), "--model"),
        (("generate", "--max-rows", "x"), "'x' found, int expected"),
        (("gener",), "invalid choice: 'gener'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_flag_is_refused_in_one_line(capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_help_gives_every_flag_its_meaning(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for config in (EngineConfig, SamplingParams):
        for field in fields(config):
            assert meaning_of(field), field.name
            assert meaning_of(field) in text


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"midstream {own_version()}\n"


def test_help_is_the_module_docstring(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    assert cli.__doc__.strip() in capsys.readouterr().out


def test_info_reports_torch_and_the_families(capsys):
    assert cli.main(["info"]) == 0
    report = capsys.readouterr().out
    assert "\ntorch " in report
    assert "families      bamba, qwen3_next" in report
