"""Which kernel a call runs, and what is said when it is not the one that was hoped for."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import liger_core
from liger_core import BackendInfo, Unsupported, backend, cli, dispatch, doctor, resolve
from liger_core.backend import BrokenBackend

X = torch.tensor([[3.0, 4.0]])
W = torch.ones(2)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, toys: None) -> list[str]:
    """The languages that ran rms_norm, in order."""
    import toy_opaque.ops.rms_norm as opaque
    import toy_traced.ops.rms_norm as traced

    seen: list[str] = []
    for name, module in (("toy-traced", traced), ("toy-opaque", opaque)):

        def forward(*args: object, name: str = name, inner: object = module.forward, **kwargs: object) -> object:
            seen.append(name)
            return inner(*args, **kwargs)  # type: ignore[operator]

        monkeypatch.setattr(module, "forward", forward)
    reference = liger_core.rms_norm.reference
    monkeypatch.setattr(liger_core.rms_norm, "reference", lambda **kw: (seen.append("torch"), reference(**kw))[1])
    return seen


def test_default_language_of_the_device(ran: list[str]) -> None:
    liger_core.rms_norm(X, W)
    assert ran == ["toy-traced"]


def test_use_demands_and_restores(ran: list[str]) -> None:
    with liger_core.use("toy-opaque"):
        liger_core.rms_norm(X, W)
        with liger_core.use("torch"):
            liger_core.rms_norm(X, W)
        liger_core.rms_norm(X, W)
    liger_core.rms_norm(X, W)
    assert ran == ["toy-opaque", "torch", "toy-opaque", "toy-traced"]


def test_use_for_one_op_and_for_the_process(ran: list[str]) -> None:
    liger_core.use("torch", rms_norm="toy-opaque")
    liger_core.rms_norm(X, W)
    liger_core.use(rms_norm="torch")
    liger_core.rms_norm(X, W)
    liger_core.use()
    liger_core.rms_norm(X, W)
    assert ran == ["toy-opaque", "torch", "toy-traced"]


def test_use_can_be_entered_again(ran: list[str]) -> None:
    """A `use` that is made once holds in each block, and each block restores what held before it."""
    u = liger_core.use("torch")
    for _ in range(2):
        with u:
            liger_core.rms_norm(X, W)
            with liger_core.use("toy-opaque"), u:
                liger_core.rms_norm(X, W)
            liger_core.rms_norm(X, W)
        liger_core.rms_norm(X, W)
    assert ran == ["torch", "torch", "torch", "toy-traced"] * 2


def test_use_restores_what_was_set_in_between(toys: None) -> None:
    u = liger_core.use("torch")
    liger_core.use("toy-opaque")
    with u:
        assert dispatch.state.demand == "torch"
    assert dispatch.state.demand == "toy-opaque"


def test_use_decorates(ran: list[str]) -> None:
    """It holds while the function runs, also when that calls itself or raises; the process is as it was."""

    @liger_core.use("torch")
    def norm(x: torch.Tensor, again: int = 1) -> torch.Tensor:
        """Normalises."""
        y = liger_core.rms_norm(x, W)
        return norm(y, again - 1) if again else y

    assert dispatch.state.demand is None
    norm(X)
    liger_core.rms_norm(X, W)
    assert ran == ["torch", "torch", "toy-traced"]
    assert (norm.__name__, norm.__doc__) == ("norm", "Normalises.")
    with pytest.raises(TypeError, match="x is a str"):
        norm("x")  # type: ignore[arg-type]
    assert dispatch.state.demand is None


def test_the_names_of_liger_kernel_are_read_when_ours_are_unset(
    ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """liger-kernel reads these variables as well, and takes neither our languages nor one per op."""
    monkeypatch.setenv("LIGER_KERNEL_BACKEND", "toy-opaque")
    monkeypatch.setenv("LIGER_KERNEL_STRICT", "1")
    for ours, expected in (("", "toy-opaque"), ("torch", "torch"), ("toy-traced,rms_norm=torch", "torch")):
        monkeypatch.setenv("LIGER_LANGUAGE", ours)
        dispatch.settings.cache_clear()
        liger_core.rms_norm.forget_plans()
        liger_core.rms_norm(X, W)
        assert ran.pop() == expected
    monkeypatch.delenv("LIGER_LANGUAGE")
    monkeypatch.setenv("LIGER_KERNEL_BACKEND", "cutedsl")
    dispatch.settings.cache_clear()
    liger_core.rms_norm.forget_plans()
    with pytest.raises(Unsupported, match="LIGER_KERNEL_BACKEND: there is no language 'cutedsl'"):
        liger_core.rms_norm(X, W)
    monkeypatch.delenv("LIGER_KERNEL_BACKEND")
    for ours, strict in ((None, True), ("0", False), ("1", True)):
        if ours is not None:
            monkeypatch.setenv("LIGER_STRICT", ours)
        dispatch.settings.cache_clear()
        assert dispatch.settings().strict is strict
    assert dispatch.settings().strict_variable == "LIGER_STRICT"


def test_environment_variable(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGER_LANGUAGE", "torch,rms_norm=toy-opaque")
    dispatch.settings.cache_clear()
    liger_core.rms_norm.forget_plans()
    liger_core.rms_norm(X, W)
    with liger_core.use("toy-traced"):
        liger_core.rms_norm(X, W)
    assert ran == ["toy-opaque", "toy-traced"]


@pytest.mark.parametrize(
    ("demand", "error", "says"),
    [
        ("nope", Unsupported, "no language 'nope'; installed: torch, toy-opaque, toy-traced"),
        ("toy-trace", Unsupported, "no language 'toy-trace'; close to it: toy-traced"),
        ("cutile", Unsupported, "cutile is not installed: uv pip install "),
        ("torch,bogus=torch", ValueError, "no op 'bogus'; the ops are"),
        ("rmsnorm=torch", ValueError, "no op 'rmsnorm'; close to it: rms_norm"),
        ("torch,torch", ValueError, "it takes LANGUAGE, OP=LANGUAGE"),
        (",", ValueError, "it takes LANGUAGE, OP=LANGUAGE"),
    ],
)
def test_bad_demands(
    toys: None, monkeypatch: pytest.MonkeyPatch, demand: str, error: type[Exception], says: str
) -> None:
    monkeypatch.setenv("LIGER_LANGUAGE", demand)
    with pytest.raises(error, match=f"LIGER_LANGUAGE.*{says}"):
        liger_core.rms_norm(X, W)


def test_bad_use_leaves_the_setting_alone(toys: None) -> None:
    with liger_core.use("torch"):
        with pytest.raises(Unsupported, match="no language"):
            liger_core.use("nope")
        assert dispatch.state.demand == "torch"


@pytest.mark.parametrize("language", ["", "torch ", "torch,torch", "rms_norm=torch", "torch,rms_norm=torch"])
def test_what_is_no_language(toys: None, language: str) -> None:
    for source, call in (
        ("use", lambda: liger_core.use(language)),
        ("use", lambda: liger_core.use(rms_norm=language)),
        ("get_op", lambda: liger_core.get_op("rms_norm", language=language)),
    ):
        with pytest.raises(ValueError, match=f"{source}: a language is '{language}'; it takes the name of one"):
            call()
    assert dispatch.state.demand is None


def test_a_language_is_a_str(toys: None) -> None:
    for source, call in (
        ("use", lambda: liger_core.use(5)),  # type: ignore[arg-type]
        ("use", lambda: liger_core.use(rms_norm=5)),  # type: ignore[arg-type]
        ("get_op", lambda: liger_core.get_op("rms_norm", language=5)),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=f"{source}: a language is 5; it takes a str"):
            call()


def test_demand_on_the_wrong_device(toys: None) -> None:
    with liger_core.use("toy-traced"), pytest.raises(Unsupported, match="toy-traced runs on cpu, not on meta"):
        liger_core.rms_norm(X.to("meta"), W.to("meta"))


def test_demand_for_an_op_without_kernel(toys: None) -> None:
    with liger_core.use("toy-traced"), pytest.raises(Unsupported, match="toy_traced has no kernel for softmax"):
        liger_core.softmax(X)


def test_demanded_refusal_is_an_error(toys: None) -> None:
    with (
        liger_core.use("toy-traced"),
        pytest.raises(Unsupported, match="rms_norm on cpu: toy-traced: casting_mode 'none'"),
    ):
        liger_core.rms_norm(X, W, casting_mode="none")


def test_default_refusal_falls_back_and_says_so_once(ran: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="liger_core")
    for _ in range(2):
        liger_core.rms_norm(X, W, casting_mode="none")
    assert ran == ["torch", "torch"]
    (record,) = caplog.records
    assert (
        "rms_norm on cpu runs the PyTorch reference (toy-traced: casting_mode 'none' is not written)" in record.message
    )
    for _ in range(2):
        liger_core.rms_norm(X.double(), W.double())
    assert "toy-traced: weight is float64" in caplog.records[1].message, "another reason is said, too"
    assert len(caplog.records) == 2


def test_strict_makes_the_fallback_an_error(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGER_STRICT", "1")
    liger_core.rms_norm(X, W)
    with pytest.raises(Unsupported, match="casting_mode 'none'.*LIGER_STRICT=1 forbids"):
        liger_core.rms_norm(X, W, casting_mode="none")


def test_strict_takes_0_or_1(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGER_STRICT", "yes")
    with pytest.raises(ValueError, match="LIGER_STRICT is 'yes'; it takes 0 or 1"):
        liger_core.rms_norm(X, W)


def test_a_bug_in_a_kernel_is_not_a_fallback(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import toy_traced.ops.rms_norm as kernel

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(kernel, "forward", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        liger_core.rms_norm(X, W)


def test_a_kernel_that_does_not_import_is_not_a_fallback(install: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackendInfo, "has_kernel", lambda self, op: True)
    install(BackendInfo("acme", ("cpu",), "torch", "acme_missing", "pip install acme", ("cpu",)))  # type: ignore[operator]
    with pytest.raises(ModuleNotFoundError, match="acme_missing"):
        liger_core.rms_norm(X, W)


def test_missing_requirement_names_the_command(install: object, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="liger_core")
    install(BackendInfo("acme", ("cpu",), "acme_compiler", "toy_traced", "pip install acme", ("cpu",)))  # type: ignore[operator]
    liger_core.rms_norm(X, W)
    assert "acme: acme_compiler is not installed: pip install acme" in caplog.text
    with liger_core.use("acme"), pytest.raises(Unsupported, match="pip install acme"):
        liger_core.rms_norm(X, W)


def test_a_device_without_language_names_the_doctor(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="liger_core")
    install()
    liger_core.rms_norm(X, W)
    assert "no installed language serves cpu by default; `liger doctor` lists the others" in caplog.text
    text = str(liger_core.explain("rms_norm", device="cuda"))
    assert text.endswith("no kernel language is installed: `liger doctor` prints how to install one")


def test_a_backend_may_refuse_the_machine(install: object) -> None:
    info = BackendInfo(
        "acme", ("cpu",), "torch", "toy_traced", "pip install acme", refuses=lambda device: f"the {device} is too old"
    )
    install(info)  # type: ignore[operator]
    with liger_core.use("acme"), pytest.raises(Unsupported, match="acme: the cpu is too old"):
        liger_core.rms_norm(X, W)


def test_broken_entry_points_are_told(install: object) -> None:
    install(broken=(BrokenBackend("acme", "ImportError: libacme.so"),))  # type: ignore[operator]
    assert "acme: no: ImportError: libacme.so" in str(liger_core.explain("rms_norm", X, W))
    with pytest.raises(Unsupported, match="acme is installed but can't be imported: ImportError: libacme.so"):
        liger_core.use("acme")


def test_discover_reports_what_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:

    def entry(name: str, load: object) -> types.SimpleNamespace:
        return types.SimpleNamespace(name=name, value=f"{name}:backend", load=load)

    def missing() -> None:
        raise ImportError("no such library")

    def in_package(name: str, package: str) -> BackendInfo:
        return BackendInfo(name, ("cpu",), "torch", package, "pip install it")

    good = in_package("good", "toy_traced")
    entries = [
        entry("bad", missing),
        entry("good", lambda: good),
        entry("wrong", lambda: "not a BackendInfo"),
        entry("x-typo", lambda: in_package("x-typo", "toy_tracd")),
        entry("y-inner-typo", lambda: in_package("y-inner-typo", "toy_tracd.kernels")),
        entry("z-module", lambda: in_package("z-module", "toy_traced.ops.rms_norm")),
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries)
    languages, broken = backend.discover.__wrapped__()
    assert languages == (good,)
    assert broken[0] == BrokenBackend("bad", "ImportError: no such library")
    assert "is a str, not a BackendInfo" in broken[1].error
    assert "x-typo:backend declares package 'toy_tracd', which is not an importable package" in broken[2].error
    assert broken[3] == BrokenBackend("y-inner-typo", "ModuleNotFoundError: No module named 'toy_tracd'")
    assert "package 'toy_traced.ops.rms_norm', which is not an importable package" in broken[4].error


def test_a_language_that_two_packages_declare_is_an_error(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither runs, whichever entry point comes first by its name, unless another language is requested."""
    import toy_opaque
    import toy_traced

    other = dataclasses.replace(toy_traced.backend, package="toy_opaque")
    infos = {"a-other": other, "toy-traced": toy_traced.backend, "again": toy_traced.backend, "o": toy_opaque.backend}
    entries = [
        types.SimpleNamespace(name=name, value=f"{name}:backend", load=lambda info=info: info)
        for name, info in infos.items()
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries)
    languages, broken = backend.discover.__wrapped__()
    assert languages == (toy_opaque.backend,)
    install(*languages, broken=broken)
    both = r"toy_opaque \(entry point 'a-other'\) and toy_traced \(entry point 'again'\) both declare the language 'toy-traced'"
    with pytest.raises(Unsupported, match=f"rms_norm: {both}: uninstall one, or request another language"):
        liger_core.rms_norm(X, W)
    with pytest.raises(Unsupported, match=f"use: {both}: uninstall one"):
        liger_core.use("toy-traced")
    for language in ("torch", "toy-opaque"):
        with liger_core.use(language):
            liger_core.rms_norm(X, W)
    assert [problem.fix for problem in doctor.examine().problems] == ["uninstall one of them"]


@pytest.mark.parametrize("error", [KeyError, SyntaxError, AssertionError, SystemExit, ZeroDivisionError])
def test_whatever_a_package_raises_is_its_own_error(
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    error: type[BaseException],
) -> None:
    """From its entry point, from its ``ops`` and from what it says of a machine: the others go on, and it is named."""
    import toy_traced

    def fails(*_: object) -> str | None:
        raise error("acme's own")

    picky = BackendInfo("a-picky", ("cpu",), "torch", "toy_traced", "pip install it", ("cpu",), refuses=fails)
    name = f"liger_ops_{error.__name__.lower()}"
    (tmp_path / name / "ops").mkdir(parents=True)
    (tmp_path / name / "__init__.py").write_text("")
    text = "def" if error is SyntaxError else f"raise {error.__name__}"
    (tmp_path / name / "ops" / "__init__.py").write_text(text)
    (tmp_path / name / "ops" / "rms_norm.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    ops = BackendInfo("b-ops", ("cpu",), "torch", name, "pip install it", ("cpu",))
    entries = [
        types.SimpleNamespace(name="acme", value="acme:backend", load=fails),
        types.SimpleNamespace(name="toy-traced", value="toy:backend", load=lambda: toy_traced.backend),
        types.SimpleNamespace(name="b-ops", value="ops:backend", load=lambda: ops),
        types.SimpleNamespace(name="a-picky", value="picky:backend", load=lambda: picky),
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries)
    languages, broken = backend.discover.__wrapped__()
    assert [b.name for b in broken] == ["acme"]
    assert error.__name__ in broken[0].error
    install(*languages, broken=broken)
    liger_core.rms_norm(X, W)
    explanation = str(liger_core.explain("rms_norm", X, W))
    assert "-> toy-traced: chosen" in explanation
    assert f"acme: no: {error.__name__}" in explanation
    assert f"b-ops: no: {name}.ops can't be imported: {error.__name__}" in explanation
    assert f"a-picky: no: toy_traced can't say whether it runs on cpu: {error.__name__}" in explanation
    assert liger_core.list_overridden_ops("cpu") == ["rms_norm"]
    with liger_core.use("b-ops"), pytest.raises(Unsupported, match=f"ops can't be imported: {error.__name__}"):
        liger_core.rms_norm(X, W)
    assert cli.main(["doctor"]) == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"language": "Toy"}, "language is 'Toy'"),
        ({"language": "torch"}, "not 'torch'"),
        ({"devices": ()}, "devices is empty"),
        ({"devices": "cpu"}, "devices is 'cpu'; it takes a tuple"),
        ({"default_devices": ("cuda",)}, r"default_devices has \['cuda'\]"),
        ({"package": "not-a-name"}, "package is 'not-a-name'"),
        ({"requires": "acme.compiler"}, "requires is 'acme.compiler'"),
    ],
)
def test_invalid_declarations(changes: dict[str, object], says: str) -> None:
    fields = {
        "language": "toy",
        "devices": ("cpu",),
        "requires": "torch",
        "package": "toy",
        "install": "pip install toy",
    }
    with pytest.raises(ValueError, match=says):
        BackendInfo(**{**fields, **changes})  # type: ignore[arg-type]


def test_float64_and_tensor_subclasses_run_the_reference(ran: list[str]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert liger_core.rms_norm(X.double(), W.double()).dtype is torch.float64
    mode = FakeTensorMode()
    liger_core.rms_norm(mode.from_tensor(X), mode.from_tensor(W))
    assert ran == ["torch", "torch"]
    with liger_core.use("toy-traced"), pytest.raises(Unsupported, match="x is float64|weight is float64"):
        liger_core.rms_norm(X.double(), W.double())


def test_transforms_run_the_reference(ran: list[str]) -> None:
    """Inside of `torch.func.vmap` and `grad` a tensor has no memory of its own that a kernel could read."""
    x = X.clone().requires_grad_()
    y = liger_core.rms_norm(x, W)
    torch.testing.assert_close(torch.func.vmap(lambda row: liger_core.rms_norm(row, W))(X), y)
    slope = torch.func.grad(lambda x: liger_core.rms_norm(x, W).prod())(X)
    torch.testing.assert_close(slope, torch.autograd.grad(y.prod(), x)[0])
    assert ran == ["toy-traced", "torch", "torch"]
    with liger_core.use("toy-traced"), pytest.raises(Unsupported, match=r"a torch\.func transform is active"):
        torch.func.vmap(lambda row: liger_core.rms_norm(row, W))(X)


def test_empty_input_runs_the_reference(ran: list[str]) -> None:
    assert liger_core.rms_norm(X[:0], W).shape == (0, 2)
    assert ran == ["torch"]


def test_mixed_devices(toys: None) -> None:
    with pytest.raises(ValueError, match="rms_norm: weight is on meta; it takes x's device, cpu"):
        liger_core.rms_norm(X, W.to("meta"))


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((), {"weight": W}, "missing a required argument: 'x'"),
        ((X, W, 1e-6, 0.0), {}, "too many positional arguments"),
        ((X, W), {"x": X}, "multiple values for argument 'x'"),
        ((X, W), {"epsilon": 1e-6}, "got an unexpected keyword argument 'epsilon'"),
        ((None, W), {}, "x is a NoneType; it takes a torch.Tensor"),
    ],
)
def test_wrong_arguments(toys: None, args: tuple[object, ...], kwargs: dict[str, object], says: str) -> None:
    with pytest.raises(TypeError, match=f"rms_norm: {says}"):
        liger_core.rms_norm(*args, **kwargs)  # type: ignore[arg-type]


def test_get_op(ran: list[str]) -> None:
    assert liger_core.get_op("rms_norm", device="cpu").language == "toy-traced"
    liger_core.get_op("rms_norm", device="cpu", language="toy-opaque")(X, weight=W)
    liger_core.get_op("rms_norm", language="torch")(X, W)
    liger_core.get_op("rms_norm")(X, W)
    assert ran == ["toy-opaque", "torch", "toy-traced"]
    with pytest.raises(Unsupported, match="toy-opaque runs on cpu, not on cuda"):
        liger_core.get_op("rms_norm", device="cuda", language="toy-opaque")
    with pytest.raises(Unsupported, match="no language 'nope'"):
        liger_core.get_op("rms_norm", language="nope")
    with pytest.raises(ValueError, match="no op 'norm'"):
        liger_core.get_op("norm")
    with pytest.raises(ValueError, match="the tensors are on meta; this callable takes cpu"):
        liger_core.get_op("rms_norm", device="cpu")(X.to("meta"), W.to("meta"))


def test_explain_follows_the_call(toys: None) -> None:
    plain = liger_core.explain("rms_norm", X, W)
    assert [(c.language, c.why_not is None) for c in plain.candidates] == [
        ("toy-traced", True),
        ("toy-opaque", False),
        ("torch", True),
    ]
    assert plain.chosen is plain.candidates[0]
    assert plain.candidates[0].source.partition("toy_traced")[2].startswith("/ops/rms_norm.py:")  # type: ignore[union-attr]
    refused = liger_core.explain("rms_norm", X, W, casting_mode="none")
    assert refused.chosen.language == "torch"  # type: ignore[union-attr]
    assert "toy-traced: no: casting_mode 'none' is not written" in str(refused)
    with liger_core.use("toy-opaque"):
        demanded = liger_core.explain("rms_norm", X.bfloat16(), W)
        assert demanded.chosen is None
        assert "the call raises Unsupported" in str(demanded)


def test_explain_raises_what_the_call_raises(toys: None) -> None:
    with pytest.raises(ValueError, match="rms_norm: weight has shape"):
        liger_core.explain("rms_norm", X, W[:1])
    table = torch.ones(3, 2)
    wrong = torch.tensor([7])
    with pytest.raises(IndexError, match="embedding"):
        liger_core.embedding(wrong, table)
    assert liger_core.explain("embedding", wrong, table).chosen is not None  # their values are not read


def test_explain_inside_of_what_kernels_do_not_take(toys: None) -> None:
    texts = []

    def call(row: torch.Tensor) -> torch.Tensor:
        texts.append(str(liger_core.explain("rms_norm", row, W)))
        return liger_core.rms_norm(row, W)

    torch.func.vmap(call)(X)
    assert "toy-traced: no: a torch.func transform is active" in texts[0]
    assert "-> torch: chosen" in texts[0]


def test_explain_an_empty_call(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference makes the result, also where another language is demanded or a fallback is an error."""
    explanation = liger_core.explain("rms_norm", X[:0], W)
    assert explanation.chosen.language == "torch"  # type: ignore[union-attr]
    assert "toy-traced: no: x is empty" in str(explanation)
    monkeypatch.setenv("LIGER_STRICT", "1")
    dispatch.settings.cache_clear()
    assert liger_core.explain("rms_norm", X[:0], W).chosen.language == "torch"  # type: ignore[union-attr]
    liger_core.rms_norm(X[:0], W)
    with liger_core.use("toy-opaque"):
        assert liger_core.explain("rms_norm", X[:0], W).chosen.language == "torch"  # type: ignore[union-attr]
        liger_core.rms_norm(X[:0], W)
    with liger_core.use("toy-opaque"):
        assert liger_core.explain("softmax", X[:0]).chosen is None
        with pytest.raises(Unsupported):
            liger_core.softmax(X[:0])


def test_explain_names_what_is_in_the_way_before_how_to_ask(install: Callable[..., None]) -> None:
    install(BackendInfo("acme", ("cpu",), "acme_compiler", "toy_traced", "pip install acme"))
    assert "acme: no: acme_compiler is not installed: pip install acme" in str(liger_core.explain("rms_norm", X, W))


def test_explain_where_a_kernel_does_not_import(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is a reason where another language runs, and the call's error where this one would."""
    (tmp_path / "liger_acme" / "ops").mkdir(parents=True)
    (tmp_path / "liger_acme" / "ops" / "rms_norm.py").write_text("import acme_missing")
    monkeypatch.syspath_prepend(tmp_path)
    install(BackendInfo("acme", ("cpu",), "torch", "liger_acme", "pip install acme"))
    text = str(liger_core.explain("rms_norm", X, W))
    assert "acme: no: ModuleNotFoundError: No module named 'acme_missing'" in text
    assert "-> torch: chosen" in text
    with liger_core.use("acme"), pytest.raises(ModuleNotFoundError, match="acme_missing"):
        liger_core.explain("rms_norm", X, W)


def test_explain_says_what_may_not_fall_back(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGER_STRICT", "1")
    dispatch.settings.cache_clear()
    assert liger_core.explain("rms_norm", X, W).chosen.language == "toy-traced"  # type: ignore[union-attr]
    refused = liger_core.explain("rms_norm", X, W, casting_mode="none")
    assert refused.chosen is None
    assert "torch: no: LIGER_STRICT=1 forbids it" in str(refused)
    with liger_core.use("torch"):
        assert liger_core.explain("rms_norm", X, W).chosen.language == "torch"  # type: ignore[union-attr]


@pytest.mark.parametrize("device", ["cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_a_device_stands_for_its_type(toys: None, device: str | torch.device) -> None:
    assert liger_core.get_current_backend(device).language == "toy-traced"  # type: ignore[union-attr]
    assert liger_core.list_overridden_ops(device) == ["rms_norm"]
    assert liger_core.explain("rms_norm", device=device).chosen.language == "toy-traced"  # type: ignore[union-attr]
    op = liger_core.get_op("rms_norm", device=device, language="toy-opaque")
    assert (op.device, op(X, W).shape) == ("cpu", X.shape)


def test_a_device_without_its_plug_in(install: Callable[..., None]) -> None:
    """torch alone knows neither."""
    install(BackendInfo("acme", ("dpu",), "torch", "toy_traced", "pip install acme"))
    assert liger_core.list_overridden_ops("dpu:1") == ["rms_norm"]
    assert liger_core.explain("rms_norm", device="npu").device == "npu"


PLUG_IN = """
import types, torch
torch.utils.rename_privateuse1_backend("mlu")
torch._register_device_module("mlu", types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 1))
import liger_core
print(liger_core.infer_device(), liger_core.explain("rms_norm", device="mlu:0").device)
try:
    liger_core.explain("rms_norm", device="bogus")
except ValueError as error:
    print(error)
"""


def test_a_device_that_torch_knows_by_a_plug_in() -> None:
    """PrivateUse1 has the name that a plug-in gives it."""
    out = subprocess.run(
        [sys.executable, "-c", PLUG_IN], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert out[0] == "mlu mlu"
    assert "cpu, cuda, hpu, mlu, npu, xpu" in out[1]


@pytest.mark.parametrize("device", ["bogus", "", "npu:x", "cuda:x"])
def test_what_is_no_device(toys: None, device: str) -> None:
    for call in (
        liger_core.get_current_backend,
        liger_core.list_overridden_ops,
        lambda device: liger_core.explain("rms_norm", device=device),
        lambda device: liger_core.get_op("rms_norm", device=device),
    ):
        with pytest.raises(ValueError, match=f"device is '{device}'; it takes a torch device or its type: cpu, cuda"):
            call(device)


def test_introspection(toys: None) -> None:
    assert [b.language for b in liger_core.backends()] == ["toy-opaque", "toy-traced"]
    assert liger_core.get_current_backend("cpu").language == "toy-traced"  # type: ignore[union-attr]
    assert liger_core.get_current_backend("cuda") is None
    with liger_core.use("toy-opaque"):
        assert liger_core.get_current_backend("cpu").language == "toy-opaque"  # type: ignore[union-attr]
    with liger_core.use("torch"):
        assert liger_core.get_current_backend("cpu") is None
    assert liger_core.list_overridden_ops("cpu") == ["rms_norm"]
    assert liger_core.list_overridden_ops("cuda") == []


def test_every_op_is_exported() -> None:
    from liger_core.contract import ops

    files = {file.stem for file in (Path(liger_core.__file__).parent / "ops").glob("[!_]*.py")}
    assert {*ops} == files, f"export {', '.join(files - {*ops})} in liger_core/__init__.py"
    for name, op in ops.items():
        assert getattr(liger_core, name) is op
        assert name in liger_core.__all__


def test_dispatch_is_one_look_up_after_the_first_call(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    liger_core.rms_norm(X, W)

    def forbidden(*args: object) -> None:
        raise AssertionError("searched again")

    calls: list[str] = []
    with monkeypatch.context() as patched:
        for name in ("settings", "parse_demand", "backends"):
            patched.setattr(dispatch, name, forbidden)
        for name in ("plan", "resolve", "decide", "obstacle", "backends", "broken_backends"):
            patched.setattr(resolve, name, forbidden)
        for name in ("inspect", "_checks", "resolve"):
            patched.setattr(liger_core.rms_norm, name, forbidden)

        def note(frame: types.FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_globals["__name__"].startswith("liger_core"):
                calls.append(frame.f_code.co_name)

        sys.setprofile(note)
        liger_core.rms_norm(X, W)
        sys.setprofile(None)
    assert [name for name in calls if not name.startswith("<")] == ["__call__", "call", "bind", "plain", "run"]


def test_what_is_remembered_of_a_call_is_its_metadata(toys: None) -> None:
    """A call like an earlier one is not checked again; one that differs in anything the checks see is."""
    for _ in range(2):
        liger_core.rms_norm(X, W, eps=1.0)
        with pytest.raises(TypeError, match="eps is True"):
            liger_core.rms_norm(X, W, eps=True)
        with pytest.raises(ValueError, match="weight has shape"):
            liger_core.rms_norm(X, W[:-1])
        with pytest.raises(TypeError, match="weight has dtype"):
            liger_core.rms_norm(X, W.long())
        with pytest.raises(TypeError, match="weight is a list"):
            liger_core.rms_norm(X, W.tolist())
        with pytest.raises(TypeError, match="eps"):
            liger_core.rms_norm(X, W, eps=[])  # type: ignore[arg-type]


def test_a_kernel_is_asked_again_whether_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may look at strides, which are not remembered."""

    def refuses(x: torch.Tensor, **_: object) -> str | None:
        return None if x.is_contiguous() else "strides"

    picky = resolve.Candidate("picky", None, refuses=refuses, run=lambda *_: "picky")
    other = resolve.Candidate("other", None, run=lambda *_: "other")
    plan = resolve.resolution("rms_norm", "cpu", None, (picky, other, resolve.Candidate("torch", None)))
    monkeypatch.setattr(liger_core.rms_norm, "_plans", {("cpu", None): plan})
    monkeypatch.setattr(liger_core.rms_norm, "_ready", {})
    for _ in range(2):
        assert liger_core.rms_norm(torch.ones(2, 3), torch.ones(3)) == "picky"
        assert liger_core.rms_norm(torch.ones(3, 2).t(), torch.ones(3)) == "other"


def test_a_remembered_call_gets_a_gradient_only_where_one_is_required(toys: None) -> None:
    for x_needs, weight_needs in ((False, False), (True, False), (False, True), (False, False)):
        x, weight = X.clone().requires_grad_(x_needs), W.clone().requires_grad_(weight_needs)
        y = liger_core.rms_norm(x, weight)
        assert y.requires_grad == (x_needs or weight_needs)
        if y.requires_grad:
            y.sum().backward()
        assert (x.grad is not None, weight.grad is not None) == (x_needs, weight_needs)


def test_few_calls_are_remembered(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("liger_core.op.MOST_REMEMBERED", 3)
    for rows in range(1, 10):
        liger_core.rms_norm(X.expand(rows, *X.shape), W)
        assert 1 <= len(liger_core.rms_norm._ready) <= 3


def test_launches_go_to_the_tensors_device() -> None:
    """With several devices, the one of the tensors is current while a kernel runs, whatever the process left current."""
    current = [0]

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    module = types.SimpleNamespace(current_device=lambda: current[0], device=device)
    run = resolve.on_its_device(lambda arguments, needs, options, parts=None: current[0], "x", module)
    for index in (1, 0):
        assert run({"x": types.SimpleNamespace(device=torch.device("cuda", index))}, (), {}) == index
    assert current == [0]
