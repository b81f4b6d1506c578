"""The token ids around what is sampled, without ever tokenising that again; and what a reply says.

    chat = Chat(tokenizer)
    ids = chat.prompt(instruction, observation)            # ... up to and including "<think>"
    ids += sampled                                         # exactly what the model emitted, its end of turn included
    ids += chat.follow(sampled, next_observation)          # what the template puts around the next observation
    reply = parse_reply(chat.reply_text(sampled))          # its reasoning and its actions

A chat template renders whole conversations. Rendering again each turn would tokenise old replies anew (other ids than
were sampled), and many templates rewrite history (they delete earlier reasoning). So the template is rendered once, on
marker words, and the text between the markers is kept. Any template with user and assistant roles works; where there is
no system role, the instruction goes in front of the first observation.

Instructions and observations are trusted: the text of a special token in them becomes that token. Left out: tools, images.
"""

import re
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import partial

from jinja2 import TemplateError

SYSTEM, TURNS = "marker-s", ("marker-u1", "marker-r1", "marker-u2", "marker-r2", "marker-u3")  # user and assistant by turns
# A generation prompt may open a think block already, or hold an empty one (a template with thinking switched off).
OPEN_THINK = re.compile(r"<think>\s*(</think>\s*)?$")


class Chat:
    """What `tokenizer.chat_template` puts around the turns. ValueError when there is no template or it drops messages.

    end_ids: ids any of which ends a turn: the template's end-of-turn token, and the tokenizer's end of text.
    """

    def __init__(self, tokenizer):
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("model: its tokenizer has no chat template; valid: a chat (instruct) model, or set chat_template")
        self.tokenizer = tokenizer
        talk = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(TURNS)]
        # A later turn, from a conversation without a system message: some templates move that to the last turn.
        later_turn = _split_at(self._render(talk), TURNS[3])[1]
        self._before_observation, self._before_reply = _split_at(later_turn, TURNS[4])  # each: end of turn and header
        # A first turn may differ: begin of text, a default system message.
        self._before_instruction, self._before_first_observation, self._before_first_reply = self._first_turn(talk[0])
        # What ends a turn: the special token that the template puts after a reply, None when it puts plain text there.
        after = self._encode(self._before_observation.lstrip())[:1]
        special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special} | set(tokenizer.all_special_ids)
        self._end_id = after[0] if special.intersection(after) else None
        ends = [self._end_id, tokenizer.eos_token_id]
        self.end_ids = list(dict.fromkeys(i for i in ends if i is not None))
        if not self.end_ids:
            raise ValueError("model: neither its chat template nor its tokenizer has an end-of-turn token; set eos_token")

    def prompt(self, instruction: str, observation: str) -> list[int]:
        """Ids of the first turn's context: system, first observation, up to and including "<think>"."""
        before = self._before_instruction + instruction + self._before_first_observation
        return self._encode(before + observation + self._before_first_reply)

    def follow(self, reply_ids: list[int], observation: str) -> list[int]:
        """Ids that come after a sampled reply, up to and including the next "<think>".

        A reply that was cut (its last id ends no turn) gets the template's end of turn; one that ended itself does not.
        """
        ids = self._encode(self._before_observation + observation + self._before_reply)
        if reply_ids and reply_ids[-1] in self.end_ids and self._end_id is not None:
            ids = ids[ids.index(self._end_id) + 1 :]  # the first one is the template's: it stands before the observation
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def reply_text(self, reply_ids: list[int]) -> str:
        """The text of a sampled reply, without the end of turn: what `parse_reply` takes."""
        ended = bool(reply_ids) and reply_ids[-1] in self.end_ids
        return self.decode(reply_ids[:-1] if ended else reply_ids)

    def _encode(self, text: str) -> list[int]:
        # the template writes its own begin of text, as in apply_chat_template(tokenize=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _render(self, messages) -> str:
        """The conversation up to and including the "<think>" that a reply goes on from."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return OPEN_THINK.sub("", text) + "<think>"

    def _first_turn(self, user) -> tuple[str, str, str]:
        """Text before the instruction, between it and the observation, and after that."""
        try:
            text = self._render([{"role": "system", "content": SYSTEM}, user])
        except TemplateError:  # how templates say that they have no system role
            text = ""
        if SYSTEM not in text:  # the instruction goes in front of the observation
            text = self._render([user]).replace(user["content"], f"{SYSTEM}\n\n{user['content']}", 1)
        before, rest = _split_at(text, SYSTEM)
        return before, *_split_at(rest, user["content"])


def _split_at(text: str, marker: str) -> tuple[str, str]:
    """The text before and after a marker. ValueError when the template did not render the marker's message."""
    before, found, after = text.partition(marker)
    if not found:
        raise ValueError("model: its chat template drops messages; valid: one that renders user and assistant turns")
    return before, after


@dataclass
class Reply:
    """A reply taken apart. Not parsed: no actions, and `reasoning` is what stands before the first "</think>"."""

    reasoning: str
    actions: list[str] = field(default_factory=list)
    parsed: bool = False


REPLY = re.compile(r"(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)


def parse_reply(text: str, placeholders: frozenset[str] = frozenset()) -> Reply:
    """Take apart what followed the prompt's "<think>": "reasoning</think><answer>a || b</answer>".

    Parsed only if every tag stands there exactly once, in this order, with nothing but white space between and after,
    there is an action, and neither reasoning nor answer is one of the `placeholders`. Only the reply is looked at, so tags
    in the prompt do not count. Never raises.
    """
    once = all(text.count(tag) == 1 for tag in ("</think>", "<answer>", "</answer>")) and "<think>" not in text
    match = REPLY.fullmatch(text) if once else None
    copied = match and not placeholders.isdisjoint(map(_fold, match.groups()))
    actions = [a.strip() for a in match[2].split("||") if a.strip()] if match and not copied else []
    return Reply(text.partition("</think>")[0].strip(), actions, bool(actions))


def find_placeholders(instruction: str) -> frozenset[str]:
    """What an instruction that shows the format has there instead of a reply: any reasoning, an answer "your ...", and "...".
    Another answer is an example, and may be the right one: "Up || Left"."""
    shown = re.findall(r"<(think|answer)>(.*?)</\1>", instruction, re.DOTALL)
    texts = [_fold(text) for tag, text in shown if tag == "think" or _fold(text).startswith("your ")]
    return frozenset(["...", *filter(None, texts)])


def _fold(text: str) -> str:
    """The text without differences of case and white space."""
    return " ".join(text.casefold().split())


def reasoning_span(reply_ids: list[int], tokenizer) -> int:
    """How many leading ids of a reply are reasoning, wholly before "</think>"; -1 if it is never closed.

    The tag may be several tokens, and its "<" may share one with the text before it; that token is not reasoning.
    """
    tag, decode = "</think>", partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if tag not in decode(reply_ids):
        return -1
    end = bisect_left(range(len(reply_ids)), True, key=lambda n: tag in decode(reply_ids[:n]))  # the shortest prefix that holds it
    return next(start for start in reversed(range(end)) if tag in decode(reply_ids[start:end]))
