"""Which clients are driven, in which version. A driver is a script in `drivers/`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Client:
    """packages: with exact versions; the first one is the client itself."""

    name: str
    packages: tuple[str, ...]
    driver: str
    registry: Literal["pypi", "npm"] = "pypi"
    deadline_seconds: float = 900.0
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that keep it from asking other hosts."""

    @property
    def version(self) -> str:
        return self.packages[0].replace("==", "@").rpartition("@")[2]


CLIENTS = (
    Client("openai, Python", ("openai==3.57.0",), "openai_python.py"),
    Client("openai, npm", ("openai@7.59.0",), "openai_node.mjs", registry="npm"),
    Client(
        "litellm",
        ("litellm==1.110.2",),
        "litellm_python.py",
        environment=(("LITELLM_LOCAL_MODEL_COST_MAP", "True"),),
    ),
    Client("langchain-openai", ("langchain-openai==1.7.4",), "langchain_python.py"),
)
