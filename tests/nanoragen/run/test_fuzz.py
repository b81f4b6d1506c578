"""Inputs at random: whatever is read from outside is taken or refused in one line, and never ends in another error.

Read here: replies of a model, conversations, command lines, files of settings, logs and whole run folders, data files of
environments. Texts are made of the pieces that each reader looks for, and of any other. Left out: model files (transformers,
safetensors and gguf read them), and the environments' own answers (tests/envs/test_conformance.py).
"""

import contextlib
import io
import json
import tempfile
from pathlib import Path

import pytest
from helpers import byte_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import eval as program
import train
from nanoragen.envs import code_data, countdown, data, lean, math_qa, search_corpus
from nanoragen.report import page as report
from nanoragen.report.runs import Run
from nanoragen.rollout.chat import Chat, parse_reply, reasoning_span
from nanoragen.run import cli, console, records, stops

INPUTS = 200  # of each of the kinds below
fuzz = settings(max_examples=INPUTS, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

any_text = st.text(max_size=30)
TAGS = [
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "||",
    " ",
    "\n",
    "<",
    "</",
    "up",
    "<|end|>",
    "\0",
    "\ud800",
    "</think></think>",
]
reply_text = st.lists(st.sampled_from(TAGS) | any_text, max_size=12).map("".join)


@fuzz
@given(reply_text)
def test_replies(text):
    reply = parse_reply(text)
    assert reply.parsed == bool(reply.actions) and all(a and a == a.strip() and a in text for a in reply.actions)
    assert "</think>" not in reply.reasoning and reply.reasoning in text
    if reply.parsed:
        assert text.count("</think>") == text.count("<answer>") == text.count("</answer>") == 1


CHAT = Chat(byte_tokenizer())
well_formed = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@fuzz
@given(st.lists(st.sampled_from(TAGS[:11]) | well_formed, max_size=8).map("".join), well_formed, st.booleans())
def test_conversations(reply, observation, ended):
    ids = CHAT._encode(reply) + [CHAT.end_ids[0]] * ended
    follow, prompt = CHAT.follow(ids, observation), CHAT.prompt(observation, reply)
    assert CHAT.decode(follow).endswith("<think>") and CHAT.decode(prompt).endswith("<think>")
    assert observation in CHAT.decode(follow) and reply in CHAT.decode(prompt)
    span = reasoning_span(ids, CHAT.tokenizer)
    assert span == -1 if "</think>" not in reply else "</think>" not in CHAT.decode(ids[:span])


# -- settings ------------------------------------------------------------------------------------------------------------

names = [f"--{name}" for name in train.Config.__dataclass_fields__]
values = st.sampled_from(
    ["1", "-1", "0", "1e-3", "-1e-3", "nan", "inf", "-inf", "true", "", "auto", "grpo", "--", "-", "=", "1_0", "9" * 5000, "{}"]
)
word = st.sampled_from([*names, "--no_bi_level", "--no-bi-level", "--config", "--nope", "-h=", "-x"]) | values | any_text
argument = word | st.tuples(st.sampled_from(names), values | any_text).map("=".join)


def one_line(read, *args):
    """read(*args), or the line and status 2 that it ended with."""
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            return read(*args)
        except SystemExit as e:
            said = err.getvalue()
            if e.code == 0:  # --help
                return None
            assert e.code == 2 and said.startswith("prog: error: ") and said.count("\n") == 1 and not out.getvalue(), said
            return None


@fuzz
@given(st.lists(argument, max_size=6), st.sampled_from([train.Config, program.Config]))
def test_command_lines(argv, config):
    found = one_line(cli.parse, config, argv, "prog", "")
    assert found is None or isinstance(found, config)


def checked(argv):
    """What a program does before it loads anything."""
    c = cli.parse(train.Config, argv, "prog", "")
    try:
        train.check(c)
    except ValueError as e:
        cli.fail("prog", e)
    return c


@fuzz
@given(
    st.lists(st.tuples(st.sampled_from([n for n in names if n not in ("--env", "--log")]), values).map("=".join), max_size=3),
    st.lists(st.tuples(st.sampled_from(["data", "eval_data", "a", ""]), values | any_text).map("=".join), max_size=2),
)
def test_checks_of_settings(argv, options):
    one_line(checked, ["--env=countdown", *argv, f"--env_options={','.join(options)}"])


yaml_piece = st.sampled_from([*(n[2:] for n in names), ":", ": ", "\n", "- ", "{", "}", "[", "]", "&a", "*a",
                              "!!python/object:os.system", "|", ">", "#", "'", '"', "? ", "---\n", "\t", "%", "!!int", "<<", "\0", "null",
                              "1e-5", "\x85"])  # fmt: skip


@fuzz
@given(
    st.lists(yaml_piece | any_text, max_size=12).map(lambda parts: "".join(parts).encode("utf-8", "surrogatepass"))
    | st.binary(max_size=60)
)
def test_files_of_settings(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.yaml"
        path.write_bytes(content)
        one_line(cli.parse, train.Config, ["--config", str(path)], "prog", "")


# -- logs and run folders ------------------------------------------------------------------------------------------------

json_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(any_text, x, max_size=3),
    max_leaves=8,
)
KEYS = ["step", "reward", "bandit/success", "rollout/in_group_reward_std", "skipped", "collapse_first_turn_sample/mi_seq_estimate",
        "step_time", "time/rollout", "env", "seed", "group", "messages", "turns", "ids", "mask", "advantage", "kept", "logprobs",
        "matrix", "own", "sums", "lengths", "nonfinite_updates", "early_stopped/variance", "regime"]  # fmt: skip
record = st.dictionaries(st.sampled_from(KEYS) | any_text, json_value, max_size=8)
stepped = st.tuples(st.integers(0, 5), record).map(lambda x: {"step": x[0], **{k: v for k, v in x[1].items() if k != "step"}})
json_line = (record | stepped | json_value).map(lambda x: json.dumps(x).encode())
log_line = (
    json_line
    | st.binary(max_size=40)
    | st.sampled_from([b"\0\0\0", b'{"step": 2, "x', b"\xe4\xbd", b"[" * 20_000, b'{"step": 1e400}', b"9" * 5000])
)
log_file = st.lists(log_line, max_size=8).map(b"\n".join) | st.lists(log_line, max_size=8).map(
    lambda x: b"".join(y + b"\n" for y in x)
)


@fuzz
@given(log_file)
def test_logs_at_a_resume(content):
    whole = [records.whole_record(line) for line in io.BytesIO(content)]
    keep = [line for line in whole if line and line["step"] <= 3]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "metrics.jsonl").write_bytes(content)
        assert repr(records.rewind(folder, 3)) == repr(keep)  # repr: NaN is not equal to itself
        left = (Path(folder) / "metrics.jsonl").read_bytes()
        assert content.startswith(left) and (not left or left.endswith(b"\n"))
        assert repr(records.rewind(folder, 3)) == repr(keep)


@fuzz
@given(log_file, log_file, log_file, log_file)
def test_run_folders_in_a_report(log, episodes, cross, config):
    with tempfile.TemporaryDirectory() as folder:
        for name, content in (("metrics", log), ("rollouts", episodes), ("cross", cross)):
            (Path(folder) / f"{name}.jsonl").write_bytes(content)
        (Path(folder) / "config.json").write_bytes(config)
        assert "</html>" in report.page([Run(folder).read()])


measured = st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)  # NaN is written as null


@fuzz
@given(
    st.lists(
        st.dictionaries(st.sampled_from([k for k in KEYS if k not in ("step", "regime")]), measured, max_size=8),
        min_size=1,
        max_size=25,
    )
)
def test_early_stops_and_the_diagnosis_after_damage(history):
    history = [{"step": n, **line} for n, line in enumerate(history)]
    found = {"success": 0.5, "success_low": 0.4, "success_high": 0.6}
    stops.early_stop(history, "bandit", "variance,filtered,success")
    assert console.diagnosis(history, found, found, "bandit")


# -- data files ----------------------------------------------------------------------------------------------------------

FIELDS = ["nums", "target", "question", "answer", "query", "response", "problem", "solution", "statement", "proof", "header",
          "golden_answers", "supporting_facts", "context", "title", "text", "contents", "question_content", "starter_code", "metadata",
          "public_test_cases", "private_test_cases", "tests", "input_output", "solutions"]  # fmt: skip
row = (
    st.dictionaries(st.sampled_from(FIELDS) | any_text, json_value | st.lists(st.integers(-5, 200), max_size=5), max_size=6)
    | json_value
)
data_file = (st.lists(row, max_size=4).map(lambda rows: json.dumps(rows).encode())
             | st.lists(row, max_size=4).map(lambda rows: b"\n".join(json.dumps(r).encode() for r in rows)) | log_file)  # fmt: skip
READERS = {
    "countdown": lambda path: data.read_rows(path, countdown.numbers_and_target),
    "math": lambda path: data.read_rows(path, math_qa.question_and_answer),
    "lean": lambda path: data.read_rows(path, lean.theorem_of),
    "code": lambda path: code_data.tasks_from(path, 4),
    "questions": lambda path: data.read_rows(path, search_corpus._read_question),
    "passages": lambda path: data.read_rows(path, search_corpus._read_passage),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
@fuzz
@given(content=data_file)
def test_data_files(reader, content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.jsonl"
        path.write_bytes(content)
        try:
            assert reader(path)
        except ValueError as e:
            assert not isinstance(e, UnicodeError) and str(e).startswith("data: ") and str(path) in str(e), e
