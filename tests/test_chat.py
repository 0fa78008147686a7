"""Chat templates as ids: what grows turn by turn is what the template writes at once, or it is refused."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from skyrl_maze.chat import ChatFormat
from skyrl_maze.errors import ConfigError
from skyrl_maze.pictures import PLACE

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
CORPUS = ["user assistant system You moved right. The goal is near: ('move', 0)\n\n7 turns left."] * 2


def template(
    answer="message.content",
    closing="'<|im_end|>\n'",
    prompt="'<|im_start|>assistant\n'",
    start="",
    number="",
    listed="messages",
):
    """A template like Qwen's, with one thing or another done differently."""
    return (
        f"{start}{{% set seen = namespace(count=0) %}}{{% for message in {listed} %}}"
        "{{ '<|im_start|>' + message.role + '\n' }}"
        f"{{% if message.role == 'assistant' %}}{{{{ {answer} }}}}"
        "{% elif message.content is string %}{{ message.content }}"
        "{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
        f"{{% set seen.count = seen.count + 1 %}}{number}<|vision_start|><|image_pad|><|vision_end|>"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
        f"{{{{ {closing} }}}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ {prompt} }}}}{{% endif %}}"
    )


PLAIN = template()
WITH_SYSTEM = template(
    start="{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou walk mazes.<|im_end|>\n' }}{% endif %}"
)
# As a `generation_prompt` may say who answers; the history says so too.
WITH_PERSONA = template(
    answer="(persona or '') + message.content", prompt="'<|im_start|>assistant\n' + (persona or '')"
)
# `enable_thinking` is Qwen3's name for it.
EMPTY_THOUGHT = template(
    prompt="'<|im_start|>assistant\n' + ('' if enable_thinking else '<think>\n\n</think>\n\n')"
)
KINDS = {"plain": (PLAIN, {}), "system": (WITH_SYSTEM, {}), "persona": (WITH_PERSONA, {"persona": "I say: "})}


@pytest.fixture(scope="module")
def tokenizer():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    trained = json.loads(bpe.to_str())["model"]
    made = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(pair) for pair in trained["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL,
        chat_template=PLAIN,
    )
    made.add_tokens(VISION)  # not special to the tokenizer, as some checkpoints have them
    return made


@pytest.fixture(scope="module")
def vision_ids(tokenizer):
    return tokenizer.convert_tokens_to_ids(VISION)


@pytest.fixture(scope="module")
def formats(tokenizer, vision_ids):
    return {
        name: ChatFormat(tokenizer, source, kwargs, vision_ids) for name, (source, kwargs) in KINDS.items()
    }


def user(content):
    return {"role": "user", "content": content}


def said(text):
    return {"type": "text", "text": text}


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


words = st.text(st.characters(codec="utf-8"), max_size=30)
contents = words | st.lists(st.just(PLACE) | st.builds(said, words), max_size=3)
# Nobody samples an answer that melts with the newline before it into one token.
answers = words.map("A".__add__)


@settings(deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    first=contents,
    turns=st.lists(st.tuples(answers, st.lists(contents, min_size=1, max_size=2)), max_size=3),
    system=st.booleans(),
)
def test_a_conversation_that_grows_is_what_the_template_writes_at_once(
    tokenizer, formats, kind, first, turns, system
):
    chat, (source, kwargs) = formats[kind], KINDS[kind]
    messages = [{"role": "system", "content": "Be brief."}] * system + [user(first)]
    ids = chat.opening(messages)
    for answer, shown in turns:
        ids += encode(tokenizer, answer)
        ids += [chat.end_of_turn_id, *chat.following([user(content) for content in shown])]
        messages += [{"role": "assistant", "content": answer}, *map(user, shown)]
    written = tokenizer.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=True, **kwargs
    )
    assert ids == encode(tokenizer, written)
    assert chat.end_of_turn_id == tokenizer.eos_token_id


def test_each_picture_is_one_image_token(tokenizer, formats):
    messages = [user([PLACE, said("left"), PLACE])]
    image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    for ids in (formats["plain"].opening(messages), formats["plain"].following(messages)):
        assert ids.count(image_id) == 2


def test_a_default_system_prompt_opens_a_conversation_and_never_follows(tokenizer, formats):
    chat = formats["system"]
    assert "You walk mazes." in tokenizer.decode(chat.opening([user("a")]))
    assert tokenizer.decode(chat.following([user("a")])) == (
        "\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Be brief."}, user("a")]
    assert "You walk mazes." not in tokenizer.decode(chat.opening(own))


def test_template_and_arguments_are_those_given(tokenizer, vision_ids):
    opened = [
        tokenizer.decode(ChatFormat(tokenizer, *given, vision_ids=vision_ids).opening([user("a")]))
        for given in [(), (WITH_PERSONA,), (WITH_PERSONA, {"persona": "I say: "})]
    ]
    assert opened[0] == opened[1] == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert opened[2] == opened[0] + "I say: "
    assert tokenizer.chat_template == PLAIN


def test_arguments_decide_whether_a_template_fits(tokenizer):
    assert ChatFormat(tokenizer, EMPTY_THOUGHT, {"enable_thinking": True}).end_of_turn_id
    with pytest.raises(ConfigError, match="rewrites answers"):
        ChatFormat(tokenizer, EMPTY_THOUGHT, {"enable_thinking": False})


REWRITERS = {
    "reasoning of all answers is dropped": template(
        answer="message.content.split('</think>')[-1].lstrip('\n')"
    ),
    # As Qwen3's does: only what comes after the last question keeps its reasoning.
    "reasoning of earlier answers is dropped": template(
        answer="message.content if loop.last else message.content.split('</think>')[-1].lstrip('\n')"
    ),
    "an empty thought before the answer, not in history": EMPTY_THOUGHT,
    "earlier answers are shortened": template(answer="message.content if loop.last else message.content[:3]"),
    "only the last messages are shown": template(listed="messages[-3:]"),
    "all but the last answer are left out": template(answer="message.content if loop.last else ''"),
    "turns are numbered from the end": template(closing="'<|im_end|>' ~ loop.revindex"),
}


@pytest.mark.parametrize("source", REWRITERS.values(), ids=REWRITERS.keys())
def test_a_template_that_rewrites_history_is_refused(tokenizer, source):
    with pytest.raises(ConfigError) as caught:
        ChatFormat(tokenizer, source)
    assert "the chat template" in str(caught.value)


def test_the_refusal_says_what_to_do_and_shows_both_texts(tokenizer):
    with pytest.raises(ConfigError, match="rewrites the reasoning in earlier answers") as caught:
        ChatFormat(tokenizer, REWRITERS["reasoning of all answers is dropped"])
    assert "set generator.chat_template to a template that keeps what was said" in str(caught.value)
    assert r"some reasoning\n</think>\n\nplain<|im_end|>" in str(caught.value)


@pytest.mark.parametrize("answer", ["''", "message.content | upper", "message.content | length"])
def test_a_template_that_leaves_answers_out_is_refused(tokenizer, answer):
    with pytest.raises(ConfigError, match="leaves the assistant's answers out; give another one"):
        ChatFormat(tokenizer, template(answer=answer))


@pytest.mark.parametrize("closing", ["'\n'", "''", "' <|im_end|>'", "'</answer>\n'"])
def test_a_template_that_closes_turns_with_no_special_token_is_refused(tokenizer, closing):
    with pytest.raises(ConfigError, match=r"closes an answer with no special token.* cannot be told"):
        ChatFormat(tokenizer, template(closing=closing))


def test_a_template_that_closes_the_last_answer_in_another_way_is_refused(tokenizer):
    # The token that ends a turn in the middle would never be the one that the policy is shown to end with.
    other = "'<|endoftext|>' if loop.last and not add_generation_prompt else '<|im_end|>\n'"
    with pytest.raises(ConfigError):
        ChatFormat(tokenizer, template(closing=other))


def test_a_template_that_counts_pictures_through_the_conversation_is_refused(tokenizer, vision_ids):
    # Qwen's `add_vision_id`: the second picture is "Picture 2" there, whatever follows by itself.
    counting = template(number="{% if add_vision_id %}Picture {{ seen.count }}: {% endif %}")
    assert ChatFormat(tokenizer, counting, {}, vision_ids).end_of_turn_id
    with pytest.raises(ConfigError):
        ChatFormat(tokenizer, counting, {"add_vision_id": True}, vision_ids)


# ---- text is data ---------------------------------------------------------------------------------

spelled = st.lists(
    st.sampled_from([*SPECIAL, *VISION, "<", "<|", "|>", "<|im_", "im_end|>", "_pad|>", " ", "a", "\n"]),
    max_size=8,
).map("".join)


@settings(deadline=None)
@given(text=spelled, as_part=st.booleans(), kind=st.sampled_from(sorted(KINDS)))
def test_text_never_becomes_a_special_token(tokenizer, formats, vision_ids, text, as_part, kind):
    special = {*tokenizer.all_special_ids, *vision_ids}

    def special_in(text):
        messages = [user([said(text), PLACE] if as_part else text)]
        chat = formats[kind]
        return [
            [i for i in ids if i in special] for ids in (chat.opening(messages), chat.following(messages))
        ]

    assert special_in(text) == special_in("a")


@pytest.mark.parametrize("token", [*SPECIAL, *VISION])
def test_a_special_token_in_text_stays_readable(tokenizer, formats, token):
    shown = tokenizer.decode(formats["plain"].opening([user(f"an echo: {token}!")]))
    assert f"an echo: {token[0]} {token[1:]}!" in shown


@pytest.mark.parametrize("token", ["<|im_end|>", "<|image_pad|>"])
def test_a_special_token_spread_over_two_parts_stays_text(tokenizer, formats, token):
    # The template writes parts one behind the other.
    spread, whole = [said(token[:5]), said(token[5:])], [said("a"), said("b")]
    token_id = tokenizer.convert_tokens_to_ids(token)
    chat = formats["plain"]
    assert chat.opening([user(spread)]).count(token_id) == chat.opening([user(whole)]).count(token_id)


def test_messages_are_not_changed(formats):
    messages = [user([said("<|im_end|>"), PLACE]), user("<|im_start|>"), {"role": "tool", "content": None}]
    before = json.dumps(messages)
    formats["plain"].opening(messages[:2])
    formats["plain"].following(messages[:2])
    assert json.dumps(messages) == before


def test_no_text_passes_for_the_mark_of_an_answer(tokenizer, formats):
    # What follows is found behind a made-up answer, which an observation may spell out too.
    text = "go on: the-answer-5e1f, or not"
    assert f"<|im_start|>user\n{text}<|im_end|>" in tokenizer.decode(formats["plain"].following([user(text)]))


@settings(deadline=None)
@given(picks=st.lists(st.integers(0, 10**6), max_size=30))
def test_the_text_of_an_answer_has_no_special_tokens(tokenizer, formats, vision_ids, picks):
    ids = [pick % len(tokenizer) for pick in picks]
    shown = formats["plain"].text(ids)
    assert not any(token in shown for token in [*SPECIAL, *VISION])
    assert shown == tokenizer.decode([i for i in ids if i not in {*tokenizer.all_special_ids, *vision_ids}])


def test_the_text_of_an_answer_keeps_its_blanks_and_loses_its_end(tokenizer, formats):
    answer = " I go ,  right .\n"
    ids = encode(tokenizer, answer)
    assert formats["plain"].text([*ids, formats["plain"].end_of_turn_id]) == answer
    assert formats["plain"].text([]) == ""


def test_a_template_that_trims_answers_is_said(tokenizer, capfd):
    from loguru import logger

    said = []
    handler = logger.add(said.append, level="WARNING")
    try:
        ChatFormat(tokenizer, template(answer="message.content | trim"))
    finally:
        logger.remove(handler)
    assert "trims the blanks" in said[0]
