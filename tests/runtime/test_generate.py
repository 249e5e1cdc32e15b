"""Generation: what ends it, what is streamed, what is counted, and sessions that are used again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime.tiny import END, GAP, VOCABULARY, byte_ids, scripted, write_tiny

import colibri
from colibri.errors import ContextLengthError, TemplateError, TokenizerError, UsageError


def test_streamed_pieces_join_to_the_text(demo: colibri.Engine) -> None:
    for prompt in ("In the beginning", "import os", "é ü", "a"):
        generation = demo.generate(prompt, max_tokens=30, seed=4, temperature=1.0)
        assert iter(generation) is generation
        assert generation.text == ""
        pieces = list(generation)
        assert "".join(pieces) == generation.text == demo.tokenizer.decode(generation.tokens)
        assert all(pieces)
        again = demo.generate(prompt, max_tokens=30, seed=4, temperature=1.0)
        assert list(again) == pieces


def test_prompt_may_be_ids(demo: colibri.Engine) -> None:
    ids = demo.tokenizer.encode("In the beginning")
    texts = ["".join(demo.generate(p, max_tokens=8, temperature=0)) for p in ("In the beginning", ids, np.array(ids))]
    assert texts[0] == texts[1] == texts[2] != ""


def test_messages_go_through_the_template(demo: colibri.Engine) -> None:
    messages = [{"role": "user", "content": 'Define "harbor".'}]
    ids = demo.tokenizer.apply_chat_template(messages)
    generation = demo.generate(messages=messages, temperature=0)
    text = "".join(generation)
    assert text == "".join(demo.generate(ids, temperature=0))
    assert (generation.finish_reason, generation.usage.prompt_tokens) == ("stop", len(ids))


def test_greedy_takes_the_largest_logit(tiny: colibri.Engine) -> None:
    tokens = byte_ids("abc")
    generation = tiny.generate("abc", max_tokens=20, temperature=0)
    list(generation)
    with tiny.session() as session:
        for token in generation.tokens:
            logits = session.forward(tokens, last_only=True)[0]
            logits[GAP] = logits[GAP + 2 :] = -np.inf  # no tokens
            assert token == np.argmax(logits)
            tokens = [token]


def test_length_is_a_reason_to_finish(tiny: colibri.Engine) -> None:
    generation = scripted(tiny, byte_ids("hello")).generate("abc", max_tokens=4)
    assert "".join(generation) == "hell"
    assert (generation.finish_reason, generation.usage) == ("length", colibri.Usage(3, 4))


def test_the_end_of_the_context_is_one_too(tiny: colibri.Engine) -> None:
    generation = scripted(tiny, byte_ids("x" * 99)).generate("abcde", context=8)
    # The last token is drawn from the full context and needs no place in it.
    assert "".join(generation) == "xxxx"
    assert (generation.finish_reason, generation.usage) == ("length", colibri.Usage(5, 4))
    with pytest.raises(ContextLengthError, match="8 tokens and the context holds 8"):
        tiny.generate("abcdefgh", context=8)
    assert "".join(scripted(tiny, byte_ids("xyz")).generate("abcdefg", context=8)) == "xy"


def test_a_stop_token_ends_the_text_and_is_not_in_it(tiny: colibri.Engine) -> None:
    generation = scripted(tiny, [*byte_ids("ok"), END, *byte_ids("never")]).generate("abc", max_tokens=9)
    assert "".join(generation) == "ok"
    assert generation.finish_reason == "stop"
    assert generation.tokens == byte_ids("ok")
    assert generation.usage == colibri.Usage(3, 3)


def test_a_stop_token_as_the_last_allowed_one_is_a_stop(tiny: colibri.Engine) -> None:
    generation = scripted(tiny, [*byte_ids("ok"), END]).generate("abc", max_tokens=3)
    assert list(generation)
    assert generation.finish_reason == "stop"


@pytest.mark.parametrize(
    ("stream", "stops", "text", "reason"),
    [
        ("O P Q rest", ["O P Q"], "", "stop"),
        ("aab", ["ab"], "a", "stop"),
        ("one two three", ["two", "two three"], "one ", "stop"),
        ("one two three", ["two three", "two"], "one ", "stop"),
        ("one tw", ["two"], "one tw", "length"),
        ("abcabd", ["abd"], "abc", "stop"),
        ("né à", ["à"], "né ", "stop"),
        ("né à", ["é"], "n", "stop"),
        ("xyxyxz", ["xyxz"], "xy", "stop"),
        ("abcd", ["bcde", "c"], "ab", "stop"),
    ],
)
def test_stop_strings(tiny: colibri.Engine, stream: str, stops: list[str], text: str, reason: str) -> None:
    ids = byte_ids(stream)
    generation = scripted(tiny, ids).generate("abc", max_tokens=len(ids), stop=stops)
    assert "".join(generation) == generation.text == text
    assert generation.finish_reason == reason


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text("abé", max_size=12), st.lists(st.text("abé", min_size=1, max_size=4), max_size=4))
def test_stop_strings_cut_at_the_earliest_match(tiny: colibri.Engine, stream: str, stops: list[str]) -> None:
    ids = [*byte_ids(stream), END]
    generation = scripted(tiny, ids).generate("abc", max_tokens=len(ids) + 1, stop=stops)
    cuts = [stream.find(stop) for stop in stops if stop in stream]
    assert "".join(generation) == (stream[: min(cuts)] if cuts else stream)
    assert generation.finish_reason == "stop"


def test_characters_are_streamed_whole(tiny: colibri.Engine) -> None:
    ids = byte_ids("a😀b")
    assert list(scripted(tiny, ids).generate("x", max_tokens=len(ids))) == ["a", "😀", "b"]
    assert list(scripted(tiny, ids[:3]).generate("x", max_tokens=3)) == ["a", "\ufffd"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": "x", "messages": []}, "either a prompt or messages"),
        ({}, "either a prompt or messages"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1, VOCABULARY]}, f"token {VOCABULARY} at index 1"),
        ({"prompt": [1, GAP]}, f"token {GAP}"),
        ({"prompt": [VOCABULARY - 1]}, f"token {VOCABULARY - 1}"),
        ({"prompt": "x", "stop": "text"}, "stop must be a list"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "x", "context": 0}, "context"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "top_k": -1}, "top_k"),
        ({"prompt": "x", "top_k": 1.0}, "top_k"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "top_p": 2}, "top_p"),
        ({"prompt": "x", "min_p": -0.1}, "min_p"),
        ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": "x", "frequency_penalty": float("inf")}, "frequency_penalty"),
        ({"prompt": "x", "top_logprobs": 21}, "top_logprobs"),
        ({"prompt": "x", "seed": -1}, "seed"),
        ({"prompt": "x", "seed": 2**64}, "seed"),
        ({"prompt": "x", "temprature": 1}, "unknown argument 'temprature'"),
    ],
)
def test_wrong_arguments_are_named_at_once(tiny: colibri.Engine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tiny.generate(**arguments)


def test_a_session_and_a_context_are_not_both_taken(tiny: colibri.Engine) -> None:
    with tiny.session() as session, pytest.raises(UsageError, match="session or a context"):
        tiny.generate("x", session=session, context=20)


def test_template_refusals(tiny: colibri.Engine, tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="no system messages, please"):
        tiny.generate(messages=[{"role": "system", "content": "x"}])
    with (
        colibri.Engine(write_tiny(tmp_path / "plain.cbi", template=None)) as engine,
        pytest.raises(TemplateError, match=r"plain\.cbi has no chat template"),
    ):
        engine.generate(messages=[{"role": "user", "content": "x"}])


def test_a_model_without_a_tokenizer_has_sessions_alone(tmp_path: Path) -> None:
    with colibri.Engine(write_tiny(tmp_path / "ids.cbi", tokenizer=False)) as engine:
        for prompt in ("text", [1, 2]):
            with pytest.raises(TokenizerError, match=r"ids\.cbi has no tokenizer"):
                engine.generate(prompt)
        with engine.session() as session:
            assert session.forward([GAP]).shape == (1, VOCABULARY)


def test_defaults_come_from_the_model(demo: colibri.Engine) -> None:
    expected = "".join(demo.generate("In the", max_tokens=30, temperature=0.7, top_p=0.9))
    assert "".join(demo.generate("In the", max_tokens=30)) == expected
    assert "".join(demo.generate("In the", max_tokens=30, temperature=None, seed=None)) == expected
    assert "".join(demo.generate("In the", max_tokens=30, temperature=1.5)) != expected


def test_seeds_differ_and_repeat(demo: colibri.Engine) -> None:
    texts = ["".join(demo.generate("In the", max_tokens=20, temperature=1.0, seed=seed)) for seed in range(6)]
    assert len(set(texts)) == 6
    assert "".join(demo.generate("In the", max_tokens=20, temperature=1.0, seed=3)) == texts[3]


def test_ids_without_a_token_are_never_drawn(tiny: colibri.Engine) -> None:
    drawn: set[int] = set()
    logits = np.zeros(VOCABULARY, np.float32)
    logits[GAP] = logits[GAP + 2 :] = 50.0
    options = colibri.SamplingOptions(temperature=5.0, top_logprobs=20)
    for position in range(10_000):
        sample = tiny.sampler.sample(logits, options, [], 0, position)
        drawn.add(sample.token)
        if position == 0:
            assert all(id <= GAP + 1 and id != GAP for id, _ in sample.top)
            assert sample.logprob == pytest.approx(-np.log(258), abs=1e-5)
    assert drawn == {*range(GAP), GAP + 1}


def test_logprobs_are_those_of_the_model(tiny: colibri.Engine) -> None:
    generation = tiny.generate("abc", max_tokens=3, temperature=0.5, top_logprobs=5, repetition_penalty=1.5)
    list(generation)
    with tiny.session() as session:
        logits = session.forward(byte_ids("abc"), last_only=True)[0].astype(np.float64)
    logits[GAP] = logits[GAP + 2 :] = -np.inf
    expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    first = generation.samples[0]
    assert first.logprob == pytest.approx(expected[first.token], abs=1e-5)
    assert [id for id, _ in first.top] == np.argsort(-expected, kind="stable")[:5].tolist()
    assert [value for _, value in first.top] == pytest.approx(np.sort(expected)[::-1][:5], abs=1e-5)


def test_a_session_used_again_gives_the_same_text(demo: colibri.Engine) -> None:
    prompts = ["In the beginning God", "In the beginning was", "In the", "import os", "In the beginning God created"]
    with demo.session(context=200) as session:
        for prompt in [*prompts, *prompts]:
            fresh = demo.generate(prompt, max_tokens=20, seed=2, context=200)
            used = demo.generate(prompt, max_tokens=20, seed=2, session=session)
            assert list(used) == list(fresh)
            assert used.usage == fresh.usage
            assert session.tokens[: used.usage.prompt_tokens] == demo.tokenizer.encode(prompt)


def test_a_conversation_computes_only_what_is_new(demo: colibri.Engine) -> None:
    messages = [{"role": "user", "content": 'Define "harbor".'}]
    with demo.session() as session:
        first = demo.generate(messages=messages, session=session, temperature=0)
        messages += [{"role": "assistant", "content": "".join(first)}, {"role": "user", "content": 'Define "sea".'}]
        before = demo.statistics().tokens
        second = demo.generate(messages=messages, session=session, temperature=0)
        next(second)
        assert demo.statistics().tokens - before < second.usage.prompt_tokens - first.usage.prompt_tokens
        text = second.text + "".join(second)
    assert text == "".join(demo.generate(messages=messages, temperature=0))


def test_a_generation_that_is_left_closes_its_session(tiny_file: Callable[[str], Path]) -> None:
    engine = colibri.Engine(tiny_file("f32"))
    generation = engine.generate("abc", max_tokens=50, temperature=1.0)
    next(generation)
    generation.close()
    assert list(generation) == []
    assert generation.finish_reason is None
    engine.close()


def test_a_cancelled_session_ends_its_generation(tiny: colibri.Engine) -> None:
    with tiny.session() as session:
        generation = tiny.generate("abc", max_tokens=50, temperature=1.0, session=session)
        next(generation)
        session.cancel()
        with pytest.raises(colibri.errors.CancelledError):
            next(generation)
        assert "".join(tiny.generate("abc", max_tokens=5, temperature=0, session=session)) == "".join(
            tiny.generate("abc", max_tokens=5, temperature=0)
        )
