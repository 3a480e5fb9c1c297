"""Fields of OpenAI's and vLLM's requests that the built-in engine does not do.

An answer that is not what was asked for is worse than none, so such a field is refused, like one that nobody knows.
What it says is accepted where that changes nothing: clients write out the defaults.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from pdlink.api.fields import BadField

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def _any(_: object) -> bool:
    return True


def _one_of(*values: object) -> Callable[[object], bool]:
    """Equal and of the same kind: 0 is no False, and 0.0 is 0."""

    def matches(given: object) -> bool:
        return any(given == value and isinstance(given, bool) == isinstance(value, bool) for value in values)

    return matches


_NOTHING = _one_of()
"""Only null, which every field may be."""

_NEUTRAL: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(
        (
            *("user", "metadata", "safety_identifier", "prompt_cache_key", "request_id", "service_tier"),
            *("parallel_tool_calls", "include_reasoning"),
        ),
        _any,
    ),
    "n": _one_of(1),
    "best_of": _one_of(1),
    "max_output_tokens": _NOTHING,
    "max_completion_tokens": _NOTHING,
    "logprobs": _one_of(False),
    "suffix": _one_of(""),
    "frequency_penalty": _one_of(0),
    "presence_penalty": _one_of(0),
    "repetition_penalty": _one_of(1),
    "length_penalty": _one_of(1),
    "min_p": _one_of(0),
    "top_k": _one_of(0, -1),
    "min_tokens": _one_of(0),
    "logit_bias": _one_of({}),
    "bad_words": _one_of([]),
    "allowed_token_ids": _NOTHING,
    "top_logprobs": _one_of(0),
    "prompt_logprobs": _one_of(False),
    "use_beam_search": _one_of(False),
    "early_stopping": _one_of(False),
    "truncate_prompt_tokens": _NOTHING,
    "include_stop_str_in_output": _one_of(False),
    "skip_special_tokens": _one_of(True),
    "spaces_between_special_tokens": _one_of(True),
    "detokenize": _one_of(True),
    "return_tokens_as_token_ids": _one_of(False),
    "response_format": _one_of({"type": "text"}),
    **dict.fromkeys(
        (
            *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
            *("guided_decoding_backend", "guided_whitespace_pattern", "structural_tag"),
        ),
        _NOTHING,
    ),
    "echo": _one_of(False),
    "tools": _one_of([]),
    "tool_choice": _one_of("none", "auto"),
    "functions": _one_of([]),
    "function_call": _one_of("none", "auto"),
    "add_generation_prompt": _one_of(True),
    "continue_final_message": _one_of(False),
    "chat_template": _NOTHING,
    "chat_template_kwargs": _one_of({}),
    "documents": _one_of([]),
    "mm_processor_kwargs": _one_of({}),
    "media_io_kwargs": _one_of({}),
    "modalities": _one_of(["text"]),
    "audio": _NOTHING,
    "prediction": _NOTHING,
    "web_search_options": _NOTHING,
    "reasoning_effort": _NOTHING,
    "thinking_token_budget": _NOTHING,
    "verbosity": _one_of("medium"),
    "store": _one_of(False),
    "prompt_embeds": _NOTHING,
    "logits_processors": _one_of([]),
    "vllm_xargs": _one_of({}),
}
"""Name to what it may say: values that leave an answer of this engine as it is."""

_OF_CHAT = {"add_special_tokens": _one_of(False)}
_OF_COMPLETIONS = {"add_special_tokens": _one_of(True)}

_GREEDY = {"top_k", "min_p"}
"""With temperature 0 the likeliest token is taken, which these always keep."""


def check_unserved(fields: dict[str, Any], known: Iterable[str], *, chat: bool, greedy: bool) -> None:
    """Raise BadField for the first of these fields that would have to change the answer.

    fields: of a request, without those that are served (`known`). greedy: its temperature is 0.
    """
    neutral = _NEUTRAL | (_OF_CHAT if chat else _OF_COMPLETIONS)
    for name, value in fields.items():
        if name not in neutral:
            near = difflib.get_close_matches(name, [*known, *neutral], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise BadField(f"{name[:100]}: unknown field; {hint}", name[:100])
        if value is None or neutral[name](value) or (greedy and name in _GREEDY):
            continue
        shown = "" if isinstance(value, dict | list) else f", got {str(value)[:100]!r}"
        raise BadField(f"{name}: the built-in engine does not do this{shown}; leave it out", name)
