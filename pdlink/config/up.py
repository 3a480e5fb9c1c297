"""A whole deployment on one machine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from pdlink.config.log import LogConfig
from pdlink.config.model import SMALL_MODEL
from pdlink.config.proxy import ProxyConfig
from pdlink.config.section import Section, no_use
from pdlink.config.sglang_servers import SglangServersConfig
from pdlink.config.store import StoreConfig
from pdlink.config.tiers import of_a_store
from pdlink.config.vllm import VllmConfig
from pdlink.config.worker import WorkerConfig

SIDES = ("prefill", "decode")
ENGINES = ("vllm", "sglang")
"""Others than our own, each with a section of its name."""


class UpConfig(Section):
    """`pdlink up`: a whole deployment on this machine."""

    engine: Literal["builtin", "vllm", "sglang"] = "builtin"
    """What the workers run: pdlink's own engine as `prefill` and `decode` say, vLLM as `vllm` says, or SGLang as
    `sglang` says."""
    model: str | None = None
    """Local directory or hub id of the model of every worker, in place of `prefill.model.path` and
    `decode.model.path`, or of `vllm.model` or `sglang.model`. None: a small one comes with pdlink."""
    vllm: VllmConfig = VllmConfig()
    """vLLM's servers."""
    sglang: SglangServersConfig = SglangServersConfig()
    """SGLang's servers."""
    proxy: ProxyConfig = ProxyConfig()
    """The proxy. Which workers there are, and what they run, is not asked here: `pdlink up` knows."""
    prefill: WorkerConfig = WorkerConfig(role="prefill")
    """Every prefill worker. A `name` is for one alone; with several they are prefill-0, prefill-1, ... Ports that are
    not 0 count up."""
    decode: WorkerConfig = WorkerConfig(role="decode")
    """Every decode worker, in the same way."""
    share_store: bool = False
    """Whether all workers keep their KV in one store process, which `store` describes, instead of each in itself."""
    store: StoreConfig = StoreConfig()
    """That process."""
    log: LogConfig = LogConfig()
    """Lines on standard error, of all processes, where `proxy.log`, `prefill.log`, `decode.log` or `store.log` say
    nothing else."""
    num_prefill: int = Field(default=1, ge=1)
    """Number of prefill workers."""
    num_decode: int = Field(default=1, ge=1)
    """Number of decode workers."""
    max_failed_starts: int | None = Field(default=None, ge=1)
    """A process that has ended is started again until it runs; so many failures in a row end the whole deployment.
    None tries for ever, at most 30 s apart."""

    @property
    def servers(self) -> VllmConfig | SglangServersConfig | None:
        """The section of another engine; None for our own."""
        if self.engine == "vllm":
            return self.vllm
        return self.sglang if self.engine == "sglang" else None

    @model_validator(mode="before")
    @classmethod
    def _handed_down(cls, data: Any) -> Any:
        """A side's workers have its role, unless it is written out; every worker has the `model`, and every process
        `log`, unless its own section says something."""
        if not isinstance(data, dict):
            return data
        sides = {side: {"role": side, **data[side]} for side in SIDES if isinstance(data.get(side), dict)}
        data, model = {**data, **sides}, data.get("model")
        ours = ("proxy",) if data.get("engine") in ENGINES else ("proxy", *SIDES)
        kept = ("store",) if data.get("share_store") else ()
        for part in (*ours, *kept) if data.get("log") is not None else ():
            below = data.get(part, {"role": part} if part in SIDES else {})
            if isinstance(below, dict):
                data[part] = {"log": data["log"], **below}
        engine = data.get("engine")
        if model is None:
            workers = [data.get(side, {"role": side}) for side in SIDES]
            if engine not in ENGINES and all(isinstance(each, dict) and "model" not in each for each in workers):
                data |= {side: {**each, "model": SMALL_MODEL} for side, each in zip(SIDES, workers, strict=True)}
            return data
        if engine in ENGINES:
            return {**data, engine: _with_model(data.get(engine, {}), "model", f"{engine}.", model)}
        for side in SIDES:
            worker = data.get(side, {"role": side})
            if isinstance(worker, dict):
                below = _with_model(worker.get("model", {}), "path", f"{side}.model.", model)
                data[side] = {**worker, "model": below}
        return data

    @model_validator(mode="after")
    def _used(self) -> UpConfig:
        for engine in ENGINES:
            if engine != self.engine:
                no_use(self, "", (engine,), f"is of engine: {engine}, and engine is {self.engine}")
        if self.servers is not None:
            reason = f"is of engine: builtin, and engine is {self.engine}, whose servers `{self.engine}` describes"
            no_use(self, "", SIDES, reason)
        if not self.share_store:
            no_use(self, "", ("store",), "is of share_store, which is off")
        elif self.servers is not None:
            raise ValueError(
                f"share_store: is of engine: builtin, and engine is {self.engine}; start `pdlink store` beside it"
            )
        else:
            for side in SIDES:
                tiers, reason = getattr(self, side).tiers, "is of a worker's own store, and share_store is on"
                no_use(tiers, f"{side}.tiers.", ("store", *of_a_store()), reason)
        made = ("prefill", "decode", "dialect", "control", "data_parallel", "stores")
        no_use(self.proxy, "proxy.", made, "is given by the workers that `pdlink up` starts")
        for side in SIDES:
            self._fits(side, getattr(self, side), getattr(self, f"num_{side}"))
        return self

    def _fits(self, side: str, worker: WorkerConfig, count: int) -> None:
        if worker.role not in (side, "both"):
            raise ValueError(f"{side}.role: must be {side!r} or 'both', got {worker.role!r}")
        if count > 1:
            if worker.name is not None:
                raise ValueError(f"{side}.name: is of one worker, and num_{side} is {count}; leave it out")
            if any("{name}" not in directory for directory in worker.tiers.disks):
                raise ValueError(
                    f"{side}.tiers.local_disk: is of one worker, and num_{side} is {count}; write {{name}} into it"
                )
            if worker.tiers.peer_port:
                raise ValueError(f"{side}.tiers.peer_port: is of one worker, and num_{side} is {count}; use 0")
            if worker.security.key_file is not None:
                raise ValueError(
                    f"{side}.security.key_file: is the key of one worker, and num_{side} is {count}; "
                    f"start {side} workers with keys one by one"
                )
        if worker.timeouts.request_s >= self.proxy.request_timeout_s:
            raise ValueError(
                f"{side}.timeouts.request_s = {worker.timeouts.request_s} s must be below "
                f"proxy.request_timeout_s = {self.proxy.request_timeout_s} s"
            )


def _with_model(section: Any, name: str, prefix: str, model: Any) -> Any:
    if not isinstance(section, dict):
        return section
    if section.get(name) not in (None, model):
        raise ValueError(f"{prefix}{name}: {section[name]!r}, and model says {model!r}; leave one of them out")
    return {**section, name: model}
