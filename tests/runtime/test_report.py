from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from midstream.graphs.table import GraphKey
from midstream.runtime.config import EngineConfig, ModelLimits, ResolvedConfig, resolve
from midstream.runtime.explain import sentence
from midstream.runtime.report import config_line, logprob_lines, summary_lines
from midstream.runtime.request import Lookup, Output, Timing, TokenLogprobs
from midstream.runtime.text import ByteTokenizer

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BEST = ((97, -0.5), (98, -1.25))
OUTPUT = Output(
    0,
    (1, 2, 3),
    (97,),
    "a",
    "length",
    2,
    Timing(0.0, 0.5, 1.0),
    (TokenLogprobs(97, -0.5, BEST),),
    None,
)
CACHE = {"asked": 6, "reused": 4, "matched_kv": 5, "matched_state": 4, "lost_for_state": 1}
STATS = {
    "graph_replays": 7,
    "graph_fallbacks": {"no CUDA device": 2},
    "cache": CACHE | {"reasons": {"no state": 1, "unknown": 2}},
}


def resolved(**options: object) -> ResolvedConfig:
    limits = ModelLimits(max_positions=512, state_page_bytes=64, kv_page_bytes=64, is_cuda=False)
    return resolve(EngineConfig(memory="1MiB", **options), limits, 0)


def line(config: ResolvedConfig, device: torch.device = CPU, tokenizer: object = None) -> str:
    model = SimpleNamespace(dtype=torch.float32, device=device)
    return config_line(config, model, tokenizer) + " "


@pytest.mark.parametrize(
    ("options", "device", "graphs"),
    [
        ({}, GPU, "graphs=rows 1-256, prompts to 8192 "),
        ({"graph_tokens": 700}, GPU, "graphs=rows 1-256, prompts to 704 "),
        ({"max_rows": 6, "max_step_tokens": 16}, GPU, "graphs=rows 1-6 "),
        ({}, CPU, "graphs=none (no CUDA) "),
        ({"graphs": "off"}, GPU, "graphs=none (off) "),
        ({"graphs": "piecewise"}, GPU, "graphs=rows 1-256 in pieces, prompts to 8192 in pieces "),
        (
            {"graphs": "full+piecewise", "graph_tokens": 1024},
            GPU,
            "graphs=rows 1-256, prompts to 512, prompts to 1024 in pieces ",
        ),
    ],
)
def test_the_captured_steps_are_said_in_a_few_words(options, device, graphs):
    text = line(resolved(**options), device)
    assert graphs in text
    assert GraphKey.__name__ not in text


@pytest.mark.parametrize(
    ("tokenizer", "name"), [(None, "none"), (ByteTokenizer(), "bytes"), (object(), "object")]
)
def test_the_configuration_names_the_tokenizer(tokenizer, name):
    assert f" tokenizer={name} " in line(resolved(), tokenizer=tokenizer)


def test_the_configuration_keeps_the_hash_key_to_itself():
    assert " hash_key=random " in line(resolved())
    text = line(resolved(hash_key="ab" * 16))
    assert " hash_key=given " in text
    assert "ab" * 16 not in text


def test_the_numbers_add_up_over_the_outputs():
    later = replace(OUTPUT, timing=Timing(0.0, 2.0, 3.0))
    assert summary_lines([OUTPUT, later], 4.0, STATS, CPU) == [
        "2 tokens in 4.00 s, 0.5 tokens/s; first token after 500 to 2000 ms; "
        "4 of 6 prompt tokens reused",
        "cache: attention matched 5 and states 4 of 6 tokens, 4 reused, 1 lost for want of a state; "
        "why no more: attention knows more, but no state was ever saved there (1 request); "
        "nothing of this beginning is saved (2 requests)",
        "device cpu; 7 graph replays; fallbacks: no CUDA device: 2",
    ]


@pytest.mark.parametrize(
    ("pace", "when"), [("late", "late"), ("early", "early"), (3, "at times of seed 3")]
)
def test_an_emulated_device_is_said_to_be_one(pace, when):
    model = SimpleNamespace(dtype=torch.float32, device=CPU)
    text = config_line(resolved(max_rows=2, max_step_tokens=16), model, None, pace) + " "
    assert f" graphs=rows 1-2 (emulated on the CPU, work done {when}) " in text
    assert " graphs=none (off) " in config_line(resolved(graphs="off"), model, None, pace) + " "


def test_prompts_of_one_token_are_said_to_have_nothing_to_reuse():
    cache = dict.fromkeys(CACHE, 0) | {"reasons": {"all": 2}}
    lines = summary_lines([OUTPUT], 1.0, STATS | {"cache": cache}, CPU)
    assert lines[1] == (
        "cache: nothing to reuse in a prompt of one token, because the last token is always computed"
    )
    assert sentence(Lookup(0, 0, 0, 0, "all")) == lines[1].removeprefix("cache: ")


def test_without_an_answer_there_are_no_numbers():
    assert summary_lines([], 0.0, STATS, CPU) == []


def test_a_token_is_shown_with_its_text_its_logprob_and_the_likeliest():
    assert list(logprob_lines([OUTPUT], ByteTokenizer())) == [
        "97 'a' -0.5000; best: 97 'a' -0.5000, 98 'b' -1.2500"
    ]
    bare = replace(OUTPUT, logprobs=(TokenLogprobs(97, -0.5, ()),))
    assert list(logprob_lines([bare, bare], None)) == ["[1] 97 -0.5000", "[2] 97 -0.5000"]
