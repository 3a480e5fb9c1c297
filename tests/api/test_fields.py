"""Bad JSON from outside is refused by field, value and range; proxy and workers read the same words alike."""

from __future__ import annotations

import msgspec
import pytest

from pdlink.api.fields import BadField, decoded
from pdlink.api.legs import DecodeParams, PrefillAddress, PrefillParams
from pdlink.api.openai import COMPLETIONS, CommonFields, Sampling, parse
from pdlink.integrations.vllm_parts.params import parse as parse_in_vllm
from pdlink.serve.openai import CompletionRequest
from pdlink.serve.openai import parse as parse_in_worker
from pdlink_proxy.dialects import DIALECTS, TransferTerms

BODY = b'{"model":"m","prompt":"x","seed":3}'


@pytest.mark.parametrize(
    ("body", "kind", "told", "param"),
    [
        (
            b'{"max_tokens":-1}',
            CommonFields,
            "max_tokens: Expected an integer from 0 to 2147483647, got -1",
            "max_tokens",
        ),
        (b'{"n":1e999}', CommonFields, "n: Expected an integer from 0 to 65536", "n"),
        (b'{"stream":"yes"}', CommonFields, "stream: Expected `bool | null`, got 'yes'", "stream"),
        (b'{"user":{}}', CommonFields, "user: Expected `str | null`, got `object`", "user"),
        (b'[{"n":-1}]', list[Sampling], "[0].n: Expected an integer from 0 to 65536, got -1", None),
        (b"[]", CommonFields, "the body: Expected `object`, got `array`", None),
        (b"{", CommonFields, "the body: not valid JSON: Input data was truncated", None),
    ],
)
def test_what_is_wrong_is_told_by_field_range_and_value(
    body: bytes, kind: object, told: str, param: str | None
) -> None:
    with pytest.raises(BadField) as raised:
        decoded(body, kind)
    assert (str(raised.value), raised.value.param) == (told, param)


@pytest.mark.parametrize("control", ["tcp://h:1", ("tcp://h:1", "tcp://h:2")])
def test_what_the_proxy_writes_of_a_leg_the_workers_read_alike(control: str | tuple[str, ...]) -> None:
    call, address = parse(COMPLETIONS, BODY), PrefillAddress(control, "p")
    attempt = TransferTerms(transfer_id="xfer-1", created=7, seed=9, prefill=address)
    common = {"transfer_id": "xfer-1", "seed": 3, "created": 7}
    bodies = DIALECTS["pdlink"].legs(call, attempt)
    read = [parse_in_worker(CompletionRequest, body, "m").kv_transfer_params for body in bodies]
    assert read == [PrefillParams(**common), DecodeParams(**common, prefill=address)]  # type: ignore[arg-type]
    params = [msgspec.json.decode(body)["kv_transfer_params"] for body in DIALECTS["vllm"].legs(call, attempt)]
    assert [parse_in_vllm(each) for each in params] == [
        PrefillParams(transfer_id="xfer-1", num_prompts=1),
        DecodeParams(transfer_id="xfer-1", prefill=address),
    ]
