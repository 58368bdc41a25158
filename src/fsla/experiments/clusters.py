"""The clusters that joblib can hand runs to. Their packages are no dependencies of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fsla.experiments.folder import RunError

LOKY = "loky"
BACKENDS = {LOKY: "", "dask": "dask[distributed]", "ray": "ray"}
"""The names that `--backend` knows, and what must be installed for each."""


@contextmanager
def joined(backend: str, address: str | None) -> Iterator[None]:
    """Joins the cluster, and leaves it in the end; raises if it cannot."""
    try:
        join, leave = _dask() if backend == "dask" else _ray()
    except ImportError as error:
        package = BACKENDS[backend]
        raise RunError(
            f"--backend {backend} needs the package {package}, here and on every worker. It cannot be imported "
            f"({error}). Install it: python -m pip install '{package}'"
        ) from None
    try:
        joined = join(address)
    except (OSError, ValueError, RuntimeError) as error:  # no answer in time is an OSError
        raise RunError(
            f"The cluster must answer at {address or 'its usual address'}. It did not: {error} Start it, or give "
            "another --address."
        ) from error
    try:
        yield
    finally:
        leave(joined)


Ends = tuple[Callable[[str | None], Any], Callable[[Any], object]]


def _dask() -> Ends:
    from dask.distributed import Client

    return Client, lambda client: client.close()


def _ray() -> Ends:
    import ray
    from ray.util.joblib import register_ray

    def join(address: str | None) -> None:
        ray.init(address=address)
        register_ray()

    return join, lambda joined: ray.shutdown()
