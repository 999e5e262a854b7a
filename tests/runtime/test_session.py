import io

from midstream.runtime.engine import Handle, Update
from midstream.runtime.request import Output, Timing
from midstream.runtime.session import AnswerPrinter


def update(text: str | None, *token_ids: int, last: bool = False) -> Update:
    output = Output(0, (1,), token_ids, text, "length", 0, Timing(0.0, 0.0, 0.0), None, None)
    return Update(Handle(0), token_ids, text, output if last else None)


def test_one_answer_is_printed_as_it_arrives_without_a_label():
    stream = io.StringIO()
    printer = AnswerPrinter(1, stream)
    printer.push(0, update("ab", 1))
    assert stream.getvalue() == "ab"
    printer.push(0, update("c", 2, last=True))
    assert stream.getvalue() == "abc\n"


def test_later_answers_wait_for_their_turn():
    stream = io.StringIO()
    printer = AnswerPrinter(3, stream)
    printer.push(2, update("x", 1, last=True))
    printer.push(1, update("y", 1))
    assert stream.getvalue() == "[1] "
    printer.push(0, update("z", 1, last=True))
    assert stream.getvalue() == "[1] z\n[2] y"
    printer.push(1, update("", 2, last=True))
    assert stream.getvalue() == "[1] z\n[2] y\n[3] x\n"


def test_token_ids_are_printed_where_there_is_no_text():
    stream = io.StringIO()
    printer = AnswerPrinter(1, stream)
    printer.push(0, update(None, 5))
    printer.push(0, update(None, 6, last=True))
    assert stream.getvalue() == "5 6 \n"
