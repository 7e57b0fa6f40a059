"""No code of ours turns bytes from elsewhere into objects but by declared structs and safetensors.

Ray unpickles what its own processes send to one another: that is what its token is for.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cluster", "router_service", "prefix_store", "expert_workers", "deploy", "loadtest")
MODULES = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"),
    *("multiprocessing.connection", "multiprocessing.managers", "xmlrpc", "torch.distributed.rpc"),
}  # fmt: skip
NAMES = {
    *("recv_pyobj", "send_pyobj", "all_gather_object", "gather_object", "broadcast_object_list"),
    *("scatter_object_list", "send_object_list", "recv_object_list", "load_state_dict_from_url"),
    *("allow_pickle", "eval", "exec", "cloudpickle", "unsafe_load", "full_load"),
}
LOADERS = {"torch.load", "numpy.load", "np.load", "yaml.load", "joblib.load"}


def findings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if _is_barred(alias.name))
            case ast.ImportFrom(module=str(module), names=names):
                found = [module, *(f"{module}.{alias.name}" for alias in names)]
                yield from (name for name in found if _is_barred(name))
            case ast.Call(func=function, keywords=keywords):
                name = ast.unparse(function)
                safe = any(k.arg == "allow_pickle" and _is_false(k.value) for k in keywords)
                if name.rpartition(".")[2] in NAMES or (name in LOADERS and not safe):
                    yield name
                yield from (
                    f"{name}(allow_pickle)"
                    for k in keywords
                    if k.arg == "allow_pickle" and not _is_false(k.value)
                )


def _is_barred(module: str) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:n]) in MODULES for n in range(1, len(parts) + 1)) or (
        parts[-1] in NAMES
    )


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_unpickles_nothing(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = {
        str(file.relative_to(ROOT)): names
        for file in files
        if (names := list(findings(file.read_text(encoding="utf-8"))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import loads", "import multiprocessing.connection as c"),
        *("from multiprocessing import connection", "from ray import cloudpickle"),
        *("torch.load(f)", "torch.load(f, weights_only=True)", "np.load(f)", "yaml.load(t)"),
        *("numpy.load(f, allow_pickle=True)", "numpy.load(f, allow_pickle=flag)", "eval(text)"),
        *("socket.recv_pyobj()", "dist.all_gather_object(out, x)", "zmq_socket.send_pyobj(x)"),
    ],
)
def test_what_would_unpickle_is_found(source: str) -> None:
    assert list(findings(source))


@pytest.mark.parametrize(
    "source",
    [
        *("np.load(f, allow_pickle=False)", "safetensors.safe_open(f, 'pt')", "json.load(f)"),
        *("import msgspec", "decoder.decode(frame)", "np.save(f, x, allow_pickle=False)"),
    ],
)
def test_what_does_not_is_left_alone(source: str) -> None:
    assert not list(findings(source))
