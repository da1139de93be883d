"""`ServeOptions`: the options of `treeflash serve`."""

from collections.abc import Sequence
from dataclasses import dataclass

from treeflash_jax.core.settings import setting, validate
from treeflash_jax.engine.settings.defaults import ACCELERATOR, PLAIN_CPU
from treeflash_jax.engine.settings.generate_config import MAX_SEQUENCES

DEFAULT_CONTEXT = 8192


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Address, sizes and limits of a server."""

    host: str = setting("127.0.0.1", "address to listen at; 0.0.0.0 lets other machines in", unit="address")
    allowed_hosts: Sequence[str] = setting(
        (),
        "name by which clients may call the server, besides localhost and --host; give it again for others",
        unset="any if other machines are let in",
        unit="name",
    )
    allowed_origins: Sequence[str] = setting(
        (),
        "origin of pages that browsers may call the server from (CORS), such as https://example.org, or * for all; give it "
        "again for others",
        unset="none",
        unit="origin",
    )
    served_model_name: Sequence[str] = setting(
        (),
        "name of the model for clients; give it again for others",
        unset="that of --verifier, of a path its last part",
        unit="name",
    )
    port: int = setting(8000, "port to listen at; 0 takes a free one", least=0, most=65535, unit="port")
    slots: int | None = setting(
        None,
        "answers decoded together",
        unset=f"{ACCELERATOR.slots}; {PLAIN_CPU.slots} on most CPUs",
        least=1,
        most=MAX_SEQUENCES,
        unit="answers",
    )
    context: int | None = setting(
        None,
        "largest number of tokens of a prompt and its answer together, for which memory is reserved in every slot",
        unset=f"the verifier's, but at most {DEFAULT_CONTEXT}",
        least=3,
        unit="tokens",
    )
    schema_states: int = setting(
        8192,
        "states of the largest schema that answers may follow, 14 for a character of maxLength; 0 refuses all",
        least=0,
        unit="states",
    )
    queue: int = setting(256, "answers that may wait for a slot; more are refused with status 429", least=0, unit="answers")
    api_key_file: str | None = setting(None, "file of the key that clients must send", unset="no key", unit="file")
    ui: bool = setting(False, "serve a chat page for browsers at /, which can show the tree of a round")
    grace: int = setting(
        30,
        "time for answers to end after SIGTERM or Ctrl-C; a second signal ends the process at once",
        least=0,
        unit="seconds",
    )

    def __post_init__(self) -> None:
        validate(self)
