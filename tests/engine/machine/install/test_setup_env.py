"""`honesmith setup`: a training environment that is complete or absent."""

import subprocess
from pathlib import Path

import pytest
from installer import Installer

from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.machine.install import setup_env
from engine.machine.processes import launcher

# What the new environment must reach: this installation.
PROOF = "import engine.home.run_dir, envs.base"
METADATA = [
    "mcp[cli]<3,>=2.3",
    "httpx<1,>=0.28",
    'torch<2.14,>=2.11; extra == "train"',
    "peft<1,>=0.21; extra == 'train'",
    'gguf<1,>=0.17; extra == "gguf"',
    'pytest<10,>=9; extra == "dev"',
    'trackio>=0.40; extra == "trackio"',
    'liger-kernel<0.9,>=0.8.5; extra == "gpu"',
    'bitsandbytes<1,>=0.48; extra == "nf4"',
]


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env.importlib.metadata, "requires", lambda name: METADATA)


def with_uv(monkeypatch: pytest.MonkeyPatch, uv: str | None = "/bin/uv") -> None:
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: uv)


def left_over(home: Home) -> list[str]:
    return [path.name for path in home.root.iterdir() if "building" in path.name]


def test_what_is_installed_is_what_our_metadata_lists_for_workers_and_gguf_files():
    assert setup_env.requirements(*setup_env.EXTRAS) == [
        "mcp[cli]<3,>=2.3",
        "httpx<1,>=0.28",
        "torch<2.14,>=2.11",
        "peft<1,>=0.21",
        "gguf<1,>=0.17",
    ]


def test_where_a_gpu_is_fused_kernels_and_four_bits_come_along():
    wanted = setup_env.requirements(*setup_env.EXTRAS, *setup_env.GPU_EXTRAS)
    assert wanted[-2:] == ["liger-kernel<0.9,>=0.8.5", "bitsandbytes<1,>=0.48"]


@pytest.mark.timeout(60)
def test_an_environment_is_built_that_runs_this_installation(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    with_uv(monkeypatch)
    run, said = Installer(), []
    reply = setup_env.setup(home, say=said.append, run=run, proof=PROOF)
    assert reply["python"] == str(home.train_python)
    (argv,) = run.calls
    assert argv[:3] == ["/bin/uv", "pip", "install"] and "torch<2.14,>=2.11" in argv
    assert argv[argv.index("--torch-backend") + 1] in ("cpu", "auto")
    done = subprocess.run(
        [str(home.train_python), "-P", "-c", "import engine; print(engine.__file__)"],
        capture_output=True,
        text=True,
    )
    assert Path(done.stdout.strip()) == Path(str(setup_env.engine.__file__))
    assert left_over(home) == []
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    assert launcher.worker_python(home) == str(home.train_python)


@pytest.mark.timeout(60)
def test_a_working_environment_is_left_alone_unless_asked(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    with_uv(monkeypatch)
    run = Installer()
    setup_env.setup(home, run=run, proof=PROOF)
    setup_env.setup(home, run=run, proof=PROOF)
    assert len(run.calls) == 1
    setup_env.setup(home, run=run, proof=PROOF, again=True)
    assert len(run.calls) == 2


@pytest.mark.timeout(60)
def test_a_failed_installation_leaves_what_was_there(home: Home, monkeypatch: pytest.MonkeyPatch):
    with_uv(monkeypatch)
    setup_env.setup(home, run=Installer(), proof=PROOF)
    with pytest.raises(UserError) as refusal:
        setup_env.setup(home, run=Installer("install"), proof=PROOF, again=True)
    assert refusal.value.code == "NO_TORCH" and refusal.value.retryable
    assert setup_env.works(home.train_python, PROOF)
    assert left_over(home) == []


@pytest.mark.timeout(60)
def test_an_environment_that_cannot_do_its_work_is_not_kept(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    with_uv(monkeypatch)
    with pytest.raises(UserError, match="does not work: ModuleNotFoundError"):
        setup_env.setup(home, run=Installer(), proof="import no_such_package")
    assert not home.train_venv.exists() and left_over(home) == []


@pytest.mark.timeout(60)
def test_without_the_right_torch_build_the_index_decides(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    with_uv(monkeypatch)
    run, said = Installer("--torch-backend"), []
    setup_env.setup(home, say=said.append, run=run, proof=PROOF)
    assert len(run.calls) == 2 and "--torch-backend" not in run.calls[1]
    assert any("index" in line for line in said)


@pytest.mark.timeout(60)
def test_pip_is_used_where_there_is_no_uv(home: Home, monkeypatch: pytest.MonkeyPatch):
    with_uv(monkeypatch, None)
    # ensurepip takes seconds and its pip is never run here.
    create = setup_env.venv.create
    monkeypatch.setattr(
        setup_env.venv, "create", lambda path, with_pip, symlinks: create(path, symlinks=symlinks)
    )
    run = Installer()
    setup_env.setup(home, run=run, proof=PROOF)
    assert run.calls[0][1:4] == ["-m", "pip", "install"]


def test_sources_that_are_not_installed_name_the_remedy(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    def missing(name: str):
        raise setup_env.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(setup_env.importlib.metadata, "requires", missing)
    with pytest.raises(UserError) as refusal:
        setup_env.setup(home, run=Installer(), proof=PROOF)
    assert refusal.value.code == "NO_TORCH" and "pip install" in refusal.value.hint
