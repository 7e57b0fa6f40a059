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
    deadline_seconds: float = 1500.0
    """Some ten times what it takes on an idle machine."""
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
    Client("anthropic, Python", ("anthropic==2.14.0",), "anthropic_python.py"),
    Client(
        "lm-eval",
        ("lm-eval[api]==0.4.13", "transformers==5.24.0", "torch==2.13.0"),
        "lm_eval_python.py",
    ),
    Client("guidellm", ("guidellm==0.8.1",), "guidellm_python.py"),
    Client("aiperf", ("aiperf==0.13.0",), "aiperf_python.py"),
    Client("schemathesis", ("schemathesis==4.32.5",), "schemathesis_python.py"),
)
