"""Chat template to ids and reply to actions (cases R2-R5, E8-E10)."""

import helpers
import pytest
from helpers import TEMPLATES, byte_tokenizer, encode
from hypothesis import given
from hypothesis import strategies as st

from nanoragen.rollout.chat import Chat, find_placeholders, parse_reply, reasoning_span

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
tagless = st.text().filter(lambda t: not any(tag in t for tag in TAGS))


# -- the glue ----------------------------------------------------------------------------------------------------------


def context(chat, replies, observations, instruction="RULES"):
    """Text of a conversation built as the rollout builds it: ids of prompt + reply + glue + reply + glue."""
    ids = chat.prompt(instruction, observations[0])
    for reply, observation in zip(replies, observations[1:]):
        sampled = encode(chat.tokenizer, reply)
        ids = ids + sampled + chat.follow(sampled, observation)
    return chat.decode(ids)


@pytest.mark.parametrize("name", ["chatml", "opens_think", "empty_think"])
def test_conversation_reads_as_the_template_renders_it(name):
    tokenizer = byte_tokenizer(TEMPLATES[name])
    replies = ["a</think><answer>up</answer>", "b</think><answer>down</answer>"]
    messages = [{"role": "system", "content": "RULES"}, {"role": "user", "content": "o1"}]
    for reply, observation in zip(replies, ["o2", "o3"]):
        messages += [{"role": "assistant", "content": "<think>" + reply}, {"role": "user", "content": observation}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False) + "<|start|>assistant\n<think>"
    assert context(Chat(tokenizer), [r + "<|end|>" for r in replies], ["o1", "o2", "o3"]) == rendered


LITERAL = {
    "no_system": "<s><|start|>user\nRULES\n\no1<|end|>\n<|start|>assistant\n<think>A<|end|>\n"
    "<|start|>user\no2<|end|>\n<|start|>assistant\n<think>B<|end|>\n<|start|>user\no3<|end|>\n<|start|>assistant\n<think>",
    "inst": "<s>[INST] <<SYS>>RULES<</SYS>>o1 [/INST]<think>A</s><s>[INST] o2 [/INST]<think>B</s><s>[INST] o3 [/INST]<think>",
    "system_last": "<s>[INST]RULES\n\no1[/INST]<think>A</s>[INST]o2[/INST]<think>B</s>[INST]o3[/INST]<think>",
    "plain_text": "system: RULES\nuser: o1\nassistant: <think>A</s>"
    "\nuser: o2\nassistant: <think>B</s>\nuser: o3\nassistant: <think>",
}


@pytest.mark.parametrize("name", LITERAL)
def test_other_shapes_of_template(name):
    end = "<|end|>" if name == "no_system" else "</s>"
    chat = Chat(byte_tokenizer(TEMPLATES[name], eos=end))
    assert context(chat, ["A" + end, "B" + end], ["o1", "o2", "o3"]) == LITERAL[name]


def test_r5_earlier_reasoning_is_kept_though_the_template_deletes_it():
    tokenizer = byte_tokenizer(TEMPLATES["forgetful"])
    user, assistant = {"role": "user", "content": "o"}, {"role": "assistant", "content": "<think>why</think>x"}
    gone = tokenizer.apply_chat_template([user, assistant, user], tokenize=False)
    assert "why" not in gone  # the template does what the case is about
    text = context(Chat(tokenizer), ["why</think>x<|end|>", "so</think>y<|end|>"], ["o1", "o2", "o3"])
    assert "<think>why</think>x<|end|>" in text and "<think>so</think>y<|end|>" in text


@pytest.mark.parametrize("name", TEMPLATES)
def test_r2_end_of_turn_is_added_only_where_the_reply_was_cut(name):
    tokenizer = byte_tokenizer(TEMPLATES[name], eos="</s>")
    chat = Chat(tokenizer)
    ended, cut = chat.follow(encode(tokenizer, "x") + chat.end_ids[:1], "o"), chat.follow(encode(tokenizer, "x"), "o")
    if name == "plain_text":  # no end of turn to add
        assert cut == ended
    else:
        assert cut[-len(ended) :] == ended
        assert chat.decode(cut[: -len(ended)]).strip() == chat.decode(chat.end_ids[:1])


def test_end_ids():
    tokenizer = byte_tokenizer(eos="</s>")
    start, end = tokenizer.convert_tokens_to_ids(["<|end|>", "</s>"])
    assert Chat(tokenizer).end_ids == [start, end]
    assert Chat(byte_tokenizer(eos="<|end|>")).end_ids == [start]
    # a reply that ends in the tokenizer's end of text ended too: the template's own end of turn is not put behind it
    assert Chat(tokenizer).decode(Chat(tokenizer).follow([end], "o")).startswith("\n<|start|>user\no<|end|>")


def test_an_end_token_in_the_observation_does_not_confuse_the_glue():
    chat = Chat(byte_tokenizer())
    text = chat.decode(chat.follow(chat.end_ids, "a<|end|>b"))
    assert text == "\n<|start|>user\na<|end|>b<|end|>\n<|start|>assistant\n<think>"


def test_instructions_may_hold_braces_and_marker_words():
    chat = Chat(byte_tokenizer())
    text = chat.decode(chat.prompt("{{ x }} marker-u1 {% if %}", "marker-s \\1"))
    head, tail = text.split("<|start|>user\n")
    assert head == "<|start|>system\n{{ x }} marker-u1 {% if %}<|end|>\n"
    assert tail == "marker-s \\1<|end|>\n<|start|>assistant\n<think>"


def test_errors():
    with pytest.raises(ValueError, match="no chat template"):
        Chat(byte_tokenizer(None))
    with pytest.raises(ValueError, match="drops messages"):
        Chat(byte_tokenizer("hello"))
    with pytest.raises(ValueError, match="end-of-turn"):
        Chat(byte_tokenizer(TEMPLATES["plain_text"], eos=None))


# -- replies -----------------------------------------------------------------------------------------------------------


def test_one_clean_reply():
    reply = parse_reply(" I see. </think>\n<answer> up || || down </answer> \n")
    assert (reply.reasoning, reply.actions, reply.parsed) == ("I see.", ["up", "down"], True)
    assert parse_reply("</think><answer>up</answer>").reasoning == ""


@pytest.mark.parametrize(
    "text",
    [
        "", "up", "why", "why</think>", "why</think>up", "<answer>up</answer>",
        "why</think><answer>up",  # unclosed
        "why</think><answer></answer>", "why</think><answer> || </answer>",  # no action
        "why<answer>up</answer></think>", "why<answer>down</answer></think><answer>up</answer>",  # inside the thinking
        "<think>why</think><answer>up</answer>", "a</think><think>b</think><answer>up</answer>",  # second think
        "a</think></think><answer>up</answer>", "a</think><answer>up</answer><answer>down</answer>",
        "a</think><answer><answer>up</answer></answer>", "a</think><answer>up</think></answer>",  # nested, crossed
        "a</think></answer>up<answer>", "a</think> so <answer>up</answer>", "a</think><answer>up</answer> done",
        "a</think><ANSWER>up</ANSWER>", "a</think><answer >up</answer>",
    ],
)  # fmt: skip
def test_e8_e10_anything_else_is_no_reply(text):
    reply = parse_reply(text)
    assert not reply.parsed and reply.actions == []


def test_e9_tags_in_the_prompt_do_not_count():
    chat = Chat(byte_tokenizer())
    prompt = chat.prompt("Reply <think>..</think><answer>up</answer>", "example: <answer>up</answer>")
    ids = encode(chat.tokenizer, "a</think><answer>down</answer><|end|>")
    assert parse_reply(chat.reply_text(ids)).actions == ["down"]
    assert not parse_reply(chat.reply_text(encode(chat.tokenizer, "nothing"))).parsed
    assert chat.decode(prompt).count("<answer>") == 2  # the example is really there


SHOWN = "Reply <think>your  reasoning</think><answer>{}</answer>. Then <think></think>"


@pytest.mark.parametrize(
    "answer, text, parsed",
    [
        ("Up || Left", "go</think><answer>Up || Left</answer>", True),  # an example may be the right answer
        ("Up || Left", "Your\nReasoning </think><answer>Down</answer>", False),
        ("Up || Left", "your reasoning</think><answer>Up || Left</answer>", False),
        ("Up || Left", "your reasoning says up</think><answer>Up</answer>", True),
        ("Up || Left", "...</think><answer>Up</answer>", False),
        ("Up || Left", "go</think><answer>...</answer>", False),
        ("Up || Left", "</think><answer>Up</answer>", True),
        ("your answer", "go</think><answer>Your answer</answer>", False),
        ("your answer", "go</think><answer>my answer</answer>", True),
        ("yours", "go</think><answer>yours</answer>", True),
    ],
)
def test_a_placeholder_of_the_instruction_is_no_reply(answer, text, parsed):
    reply = parse_reply(text, find_placeholders(SHOWN.format(answer)))
    assert reply.parsed == parsed == bool(reply.actions) and parse_reply(text).parsed
    assert reply.reasoning == parse_reply(text).reasoning


pieces = st.lists(st.sampled_from([*TAGS, "||", " ", "up", "\n", "<", "/", "é"]) | st.text(max_size=3), max_size=12)


@given(pieces.map("".join))
def test_parsing_never_raises_and_never_overlooks_a_tag(text):
    reply = parse_reply(text)
    assert bool(reply.actions) == reply.parsed
    if reply.parsed:
        assert [text.count(t) for t in TAGS] == [0, 1, 1, 1]
        assert text.index("</think>") < text.index("<answer>") < text.index("</answer>")
        assert not any(tag in a for a in reply.actions for tag in TAGS)


@given(tagless, st.lists(tagless.filter(lambda t: t.strip() and "|" not in t), min_size=1, max_size=4))
def test_a_written_reply_is_read_back(reasoning, actions):
    text = f"{reasoning}</think><answer>{'||'.join(actions)}</answer>"
    if [text.count(t) for t in TAGS] == [0, 1, 1, 1]:  # an action may end in "<" and so on
        assert parse_reply(text) == parse_reply(text + "\n")
        assert parse_reply(text).reasoning == reasoning.strip()
        assert parse_reply(text).actions == [a.strip() for a in actions]


# -- where the reasoning ends ------------------------------------------------------------------------------------------


@given(tagless.filter(lambda t: not t.endswith("<")), st.booleans())
def test_reasoning_span(reasoning, tags):
    tokenizer = TOKENIZERS[tags]
    ids = encode(tokenizer, reasoning)
    assert reasoning_span(ids + encode(tokenizer, "</think><answer>up</answer>"), tokenizer) == len(ids)
    assert reasoning_span(ids, tokenizer) == -1


TOKENIZERS = {tags: byte_tokenizer(tags=tags) for tags in (True, False)}


def test_reasoning_span_of_a_token_that_holds_the_end_and_the_tag():
    tokenizer = byte_tokenizer(tags=False, merges=[". <", ".< /"])
    ids = encode(tokenizer, "ok.</think>")
    assert tokenizer.convert_ids_to_tokens(ids)[2] == ".</"
    assert reasoning_span(ids, tokenizer) == 2
    assert reasoning_span(encode(tokenizer, "a</think>b</think>"), tokenizer) == 1  # the first one counts


def test_helpers_tokenizer_round_trip():
    tokenizer = byte_tokenizer()
    text = "ünï </think> <|end|>\n √"
    assert tokenizer.decode(encode(tokenizer, text)) == text
    assert helpers.SPECIAL[2] in tokenizer.all_special_tokens
