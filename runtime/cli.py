"""
Generates text with a hybrid model of transformers from a local folder.

midstream generate   prints the configuration first, then each answer as it arrives, and last:
                     tokens per second, time to first token, prompt tokens reused, device, graph
                     replays, fallbacks.  Answers go to stdout, all else to stderr.
                     --logprobs N adds a line for each token.
midstream explain    prints what an engine with these flags makes of the model: layers, pools, captured
                     steps and all memory that they are bound to, and the least time of a step.
                     --out writes it as JSON and as a picture for graphviz.
midstream bench graphs   measures one decode step: what its capture takes, and how it compares with
                     transformers and torch.compile.  A table, and with --out graphs.json and a plot.
midstream info       prints versions, the device, and what is missing here and why.

    midstream generate --model DIR --prompt "Once upon a time" --max-tokens 64 --temperature 0
    midstream generate --model DIR --chat --memory 8GiB
    midstream explain --model DIR --max-rows 8 --out results
    midstream bench graphs --model DIR --rows 1 8 32 --out results
    midstream info

Flags are the options of Engine and SamplingParams.  Exit status: 0, 1 when a request failed or a
line of a chat was refused, 2 for what is refused at the start, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from midstream.errors import CapacityError, ConfigError, MidstreamError
from midstream.runtime.conversation import Conversation
from midstream.runtime.flags import FlagParser, OneLineParser, add_flags, given
from midstream.runtime.installation import describe, find_installation, own_version
from midstream.runtime.options import EngineConfig
from midstream.runtime.sampling import SamplingParams

if (
    TYPE_CHECKING
):  # torch and transformers come with the commands: help and wrong flags need neither
    from midstream.runtime.session import Session

FAILED = 1
REFUSED = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except MidstreamError as error:
        print(f"midstream: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("\nmidstream: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has gone, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return status


def build_parser() -> argparse.ArgumentParser:
    """The command line; its flags follow the fields of the two public dataclasses."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser("midstream", description=__doc__, formatter_class=as_written)
    parser.add_argument("--version", action="version", version=f"midstream {own_version()}")
    commands = parser.add_subparsers(
        required=True, metavar="generate | explain | bench | info", parser_class=FlagParser
    )
    generate = commands.add_parser("generate", help="answer prompts, or chat")
    generate.set_defaults(run=run_generate)
    _add_inputs(generate)
    add_flags(generate.add_argument_group("options of Engine"), EngineConfig)
    add_flags(generate.add_argument_group("options of SamplingParams"), SamplingParams)
    explain = commands.add_parser("explain", help="what an engine makes of a model")
    explain.set_defaults(run=run_explain)
    _add_explain(explain)
    bench = commands.add_parser("bench", help="measure graphs on this machine")
    bench.add_argument("what", choices=["graphs"], help="one decode step, captured and otherwise")
    bench.set_defaults(run=run_bench_graphs)
    _add_bench(bench)
    info = commands.add_parser("info", help="what this machine can run")
    info.set_defaults(run=run_info)
    return parser


def run_generate(args: argparse.Namespace) -> int:
    """Answer the prompts of the command line, or those of a chat on stdin."""
    from midstream.runtime.config import check_options
    from midstream.runtime.engine import Engine
    from midstream.runtime.loading import load_model
    from midstream.runtime.report import config_line, logprob_lines, summary_lines
    from midstream.runtime.session import Session
    from midstream.runtime.settings import read_settings

    options, params = given(args, EngineConfig), SamplingParams(**given(args, SamplingParams))
    check_options(EngineConfig(**options))
    prompts = read_prompts(args)
    model, tokenizer = load_model(args.model, args.dtype, args.device)
    if tokenizer is None and not args.token_ids:
        raise ConfigError(
            f"generate: no tokenizer in '{args.model}', and a vocabulary of "
            f"{model.config.vocab_size} is not that of bytes, so text cannot be read; "
            "give the prompt as ids: --token-ids 1,2,3"
        )
    with Engine(model, tokenizer=tokenizer, **options) as engine:
        emulate = read_settings(os.environ).emulate
        _print_all([config_line(engine.config, model, tokenizer, emulate)])
        session = Session(engine, params, sys.stdout)
        num_refused = 0
        try:
            if args.chat:
                max_len = engine.config.max_len
                room = min(params.max_tokens, max_len // 2)  # for the answer
                num_refused = chat(session, Conversation(tokenizer, max_len - room))
            else:
                session.answer(prompts)
        finally:
            _print_all(logprob_lines(session.outputs, tokenizer))
            _print_all(
                summary_lines(session.outputs, session.seconds, engine.stats(), model.device)
            )
        return FAILED if session.num_failed or num_refused else 0


def run_explain(args: argparse.Namespace) -> int:
    """Make an engine, and say what came of it."""
    from midstream.runtime.config import check_options
    from midstream.runtime.explain_model import check_rate
    from midstream.runtime.explain_report import run
    from midstream.runtime.loading import load_model

    options = given(args, EngineConfig)
    check_options(EngineConfig(**options))
    check_rate(args.gb_per_s)
    model, _ = load_model(args.model, args.dtype, args.device)
    out = None if args.out is None else _make_folder("explain", args.out)
    print("\n".join(run(model, options, args.gb_per_s, args.buffers, out)))
    return 0


def run_bench_graphs(args: argparse.Namespace) -> int:
    """Measure one decode step of a model in several ways."""
    from midstream.runtime import bench_graphs
    from midstream.runtime.bench_steps import MOST_CALLS

    for name in ("rows", "slow_rows"):
        if any(rows < 1 for rows in getattr(args, name)):
            raise ConfigError(
                f"bench: --{name.replace('_', '-')} {getattr(args, name)}; expected numbers >= 1"
            )
    if not 1 <= args.calls <= MOST_CALLS:
        raise ConfigError(
            f"bench: --calls {args.calls}; expected a number >= 1 and up to {MOST_CALLS}, as many tokens as "
            "the measured caches hold"
        )
    model = bench_graphs.load(args.model, args.dtype, args.device)
    out = None if args.out is None else _make_folder("bench", args.out)
    what = bench_graphs.setup(model, args.model)
    _print_all([" ".join(f"{name}={value}" for name, value in what.items())])
    if model.device.type != "cuda":
        _print_all(
            ["no GPU: steps run eagerly on every path, and the device's times are wall times"]
        )
    rows = sorted(set(args.rows))
    points = bench_graphs.bench(model, rows, args.slow_rows, args.calls)
    print("\n".join(bench_graphs.table(points)))
    if out is not None:
        written = bench_graphs.write(out, what, points)
        _print_all([f"written: {', '.join(map(str, written))}"])
        if len(written) == 1:
            _print_all(["no plot: matplotlib is not installed (pip install midstream[bench])"])
    return 0


def run_info(args: argparse.Namespace) -> int:
    """Print what was found on this machine."""
    print("\n".join(describe(find_installation())))
    return 0


def chat(session: Session, conversation: Conversation) -> int:
    """One answer for each line of stdin, until its end.  Returns the number of lines refused."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # the tokenizer refuses what is no text
    num_refused = 0
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return num_refused
        if line.strip():
            try:
                take_turn(session, conversation, line.rstrip("\n"))
            except (CapacityError, ConfigError) as error:
                print(f"midstream: this line has no answer: {error}", file=sys.stderr)
                num_refused += 1


def take_turn(session: Session, conversation: Conversation, line: str) -> None:
    """Answer one line; a line that has no answer leaves the conversation as it was."""
    (output,) = session.answer([conversation.ask(line)])
    if output.error is not None:
        return
    num_left_out = conversation.answered(output.text or "")
    if num_left_out:
        print(
            f"midstream: the history no longer fits; oldest questions dropped: {num_left_out}",
            file=sys.stderr,
        )


def read_prompts(args: argparse.Namespace) -> list[str | list[int]]:
    """The prompts of the command line, in its order; none for a chat."""
    texts = args.prompt or [_read_file(path) for path in args.prompt_file or ()]
    return texts or [parse_token_ids(text) for text in args.token_ids or ()]


def parse_token_ids(text: str) -> list[int]:
    """
    >>> parse_token_ids("1, 2,3")
    [1, 2, 3]
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"generate: --token-ids {text!r}; expected numbers with commas between, such as 1,2,3"
        ) from None


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="a folder of transformers")
    parser.add_argument(
        "--dtype", default="auto", help="of the weights; default: as in config.json"
    )
    parser.add_argument(
        "--device", default="auto", help="default: cuda where there is one, else cpu"
    )


def _add_explain(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--gb-per-s", type=float, metavar="N",
        help="rate of device memory, read plus written; default: that of a copy, measured",
    )  # fmt: skip
    parser.add_argument("--buffers", action="store_true", help="list every bound buffer")
    parser.add_argument("--out", metavar="DIR", help="write explain.json and explain.dot there")
    add_flags(parser.add_argument_group("options of Engine"), EngineConfig)


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    inputs = parser.add_mutually_exclusive_group(required=True)
    repeat = "; repeat it for several requests"
    inputs.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt" + repeat)
    inputs.add_argument(
        "--prompt-file", action="append", metavar="FILE", help="a text file" + repeat
    )
    inputs.add_argument("--token-ids", action="append", metavar="IDS", help="1,2,3" + repeat)
    inputs.add_argument("--chat", action="store_true", help="one turn for each line of stdin")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="DIR|FILE",
        help="a folder of transformers, or a JSON file with model_type and sizes (random weights)",
    )  # fmt: skip
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="default: 1 8 32"
    )
    parser.add_argument(
        "--slow-rows", type=int, nargs="*", default=[1, 32], metavar="N",
        help="rows at which torch.compile is measured too, which takes minutes; no number: leave it out "
        "(default: 1 32)",
    )  # fmt: skip
    parser.add_argument(
        "--calls", type=int, default=150, metavar="N", help="steps timed (default: 150)"
    )
    parser.add_argument(
        "--dtype", default="auto", help="default: as in config.json; of a file: bfloat16 on a GPU"
    )
    parser.add_argument(
        "--device", default="auto", help="default: cuda where there is one, else cpu"
    )
    parser.add_argument("--out", metavar="DIR", help="write graphs.json and graphs.png there")


def _print_all(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr)


def _make_folder(command: str, path: str) -> Path:
    """The folder of --out, made before the work whose results it will hold."""
    folder = Path(path)
    try:
        if not path:
            raise OSError("it is empty")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{command}: --out '{path}' cannot be made ({error}); give a folder to write into"
        ) from error
    return folder


def _read_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"generate: --prompt-file '{path}' cannot be read ({error}); give a UTF-8 text file"
        ) from error
