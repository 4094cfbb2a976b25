"""What `make` installs, and which kernels the build hook compiles. Nothing is installed or compiled here."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def commands(target: str, *variables: str) -> str:
    """What `make` would run in a new checkout."""
    done = subprocess.run(
        ["make", "-n", "-C", str(ROOT), target, "VENV=/nonexistent/environment", *variables],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_demo_installs_what_it_runs_and_compiles_for_this_processor_alone() -> None:
    demo = commands("demo")
    assert "hatch_build.py host\n" in demo and '"ratoon[serve]"' in demo
    assert "hatch_build.py all" not in demo and ",dev" not in demo
    assert "source /nonexistent/environment/bin/activate" in demo


@pytest.mark.parametrize("target", ["test", "lint", "docs", "test-connectors"])
def test_targets_of_developers_install_the_rest_with_every_kernel_set(target: str) -> None:
    commanded = commands(target)
    assert "hatch_build.py all\n" in commanded and '"ratoon[serve,audio,otel,plot,ray,nixl,docs,dev]"' in commanded


@pytest.mark.skipif(platform.system() != "Linux", reason="elsewhere torch has one build")
def test_torch_is_the_cpu_build_where_there_is_no_nvidia_device() -> None:
    (version,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    for target in ("demo", "setup"):
        assert f"{version}+cpu" in commands(target, "NVIDIA_DEVICE=")
        with_device = commands(target, "NVIDIA_DEVICE=/dev/nvidiactl")
        assert version in with_device and "+cpu" not in with_device and "whl/cpu" not in with_device


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """hatch_build.py, also where hatchling is not installed."""
    interface = types.ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refuse(warning: str) -> None:
    raise AssertionError(warning)


@pytest.fixture
def source_tree(tmp_path: Path, hook: types.ModuleType) -> Path:
    """One that has a library already, as after an earlier installation."""
    native = tmp_path / hook.NATIVE
    native.mkdir(parents=True)
    (native / "kernels_old.so").write_text("")
    return tmp_path


def libraries(root: Path, hook: types.ModuleType) -> list[str]:
    return sorted(path.name for path in (root / hook.NATIVE).iterdir())


def test_all_kernel_sets_are_compiled_at_the_same_time(
    hook: types.ModuleType, source_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = hook.TARGETS["linux-x86_64"]
    monkeypatch.setattr(hook.os, "cpu_count", lambda: len(target.variants))
    together = threading.Barrier(len(target.variants), timeout=60)

    def compile_set(native: Path, library: Path, zig_target: str, cpu: str, warn: object) -> bool:
        together.wait()  # one compiler after the other would wait here for ever
        library.write_text(cpu)
        return True

    monkeypatch.setattr(hook, "_compile", compile_set)
    built = hook.compile_into_source_tree(source_tree, target, "all", refuse)
    assert libraries(source_tree, hook) == sorted(path.name for path in built)
    assert len(built) == len(target.variants)


def test_for_this_processor_the_best_set_that_the_system_allows_is_compiled(
    hook: types.ModuleType, source_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def compile_set(native: Path, library: Path, zig_target: str, cpu: str, warn: object) -> bool:
        compiled.append(library.name)
        library.write_text(cpu)
        return True

    def load(path: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(ratoon_kernels_usable=lambda: "amx" not in path)

    monkeypatch.setattr(hook, "_compile", compile_set)
    monkeypatch.setattr(hook.ctypes, "CDLL", load)
    monkeypatch.setattr(hook, "_sets_of_this_processor", lambda root: ["avx512amx", "avx512vnni", "avx512"])
    hook.compile_into_source_tree(source_tree, hook.TARGETS["linux-x86_64"], "host", refuse)
    assert compiled == ["kernels_avx512amx.so", "kernels_avx512vnni.so"]
    assert libraries(source_tree, hook) == ["kernels_avx512vnni.so"]


def test_kernels_that_were_compiled_before_the_installation_stay(
    hook: types.ModuleType, source_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hook.SETS_VARIABLE, "none")
    hook.compile_into_source_tree(source_tree, hook.TARGETS["linux-x86_64"], hook._chosen_sets(), refuse)
    assert libraries(source_tree, hook) == ["kernels_old.so"]


def test_an_unknown_choice_of_kernel_sets_is_refused(hook: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hook.SETS_VARIABLE, "best")
    with pytest.raises(ValueError, match=r"RATOON_BUILD_KERNELS: 'best' is unknown; expected one of all, host, none"):
        hook._chosen_sets()


def test_the_sets_of_this_processor_are_those_that_the_package_finds(hook: types.ModuleType) -> None:
    from ratoon.layers import native

    assert hook._sets_of_this_processor(ROOT) == native._supported_sets()


@pytest.mark.parametrize(
    ("npm", "status", "told"),
    [
        ("exit 1", 0, "the console is not type-checked: npm could not fetch typescript@"),
        ("echo good", 0, "the console is type-checked"),
        ("echo bad", 2, "main.js(1,1): error"),
    ],
)
def test_types_of_the_console_are_checked_by_a_compiler_that_npm_fetches(
    tmp_path: Path, npm: str, status: int, told: str
) -> None:
    scripts = {"npm": npm, "good": 'test "$1 $2" = "-p ratoon/console/tsconfig.json"', "bad": f"echo '{told}'; exit 2"}
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("bash", "sh", "dirname", "env"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    (tmp_path / ".ci").mkdir()  # a checkout without packages of npm
    checker = shutil.copy(ROOT / ".ci" / "check_console_types", tmp_path / ".ci")
    done = subprocess.run(
        [checker],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status and done.stdout.startswith(told), done.stderr
