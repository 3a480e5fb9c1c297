"""Fields of OpenAI's and vLLM's requests that the built-in engine does not do.

An answer that is not what was asked for is worse than none, so such a field is refused, like one that nobody knows.
What it says is accepted where that changes nothing: clients write out the defaults.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from pdlink.api.fields import BadField

if TYPE_CHECKING:
    from collections.abc import Iterable


_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "max_output_tokens": (),
    "max_completion_tokens": (),
    "logprobs": (False,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "top_k": (0, -1),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "top_logprobs": (0,),
    "prompt_logprobs": (False,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "return_tokens_as_token_ids": (False,),
    "response_format": ({"type": "text"},),
    **dict.fromkeys(
        (
            *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
            *("guided_decoding_backend", "guided_whitespace_pattern", "structural_tag"),
        ),
        (),
    ),
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "thinking_token_budget": (),
    "verbosity": ("medium",),
    "store": (False,),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
}
"""Name to what it may say beside null: values that leave an answer of this engine as it is."""
_ANY = frozenset(
    (
        *("user", "metadata", "safety_identifier", "prompt_cache_key", "request_id", "service_tier"),
        *("parallel_tool_calls", "include_reasoning"),
    )
)
"""May say anything."""

_OF_CHAT = {"add_special_tokens": (False,)}
_OF_COMPLETIONS = {"add_special_tokens": (True,)}

_GREEDY = {"top_k", "min_p"}
"""With temperature 0 the likeliest token is taken, which these always keep."""


def check_unserved(fields: dict[str, Any], known: Iterable[str], *, chat: bool, greedy: bool) -> None:
    """Raise BadField for the first of these fields that would have to change the answer.

    fields: of a request, without the served ones (`known`). greedy: its temperature is 0.
    """
    neutral = _NEUTRAL | (_OF_CHAT if chat else _OF_COMPLETIONS)
    for name, value in fields.items():
        if name in _ANY:
            continue
        if name not in neutral:
            near = difflib.get_close_matches(name, [*known, *neutral, *_ANY], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise BadField(f"{name[:100]}: unknown field; {hint}", name[:100])
        if value is None or _says(value, neutral[name]) or (greedy and name in _GREEDY):
            continue
        shown = "" if isinstance(value, dict | list) else f", got {str(value)[:100]!r}"
        raise BadField(f"{name}: the built-in engine does not do this{shown}; leave it out", name)


def _says(given: object, values: tuple[object, ...]) -> bool:
    """One of these, and of its kind: 0 is no False, and 0.0 is 0."""
    return any(given == value and isinstance(given, bool) == isinstance(value, bool) for value in values)
