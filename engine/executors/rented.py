"""What this home has rented: a file for each cluster, on the disk before it is launched.

What stands here may cost money. A file goes when the server has given the cluster back; so a
crash, a lost answer or a server that is away leaves one behind, and never the other way round.
"""

import time

from pydantic import Field, ValidationError

from engine.core.files import read_object, write_json
from engine.home.run_dir import Home
from engine.records.record import Record


class Rented(Record):
    """A cluster (one or more rented machines) that this home has asked a server for.

    Attributes:
        cluster: its name at the server.
        host: the name of the host in config.toml that it was rented through.
        run_id, launch: the run that it is for, and which start of that run.
        price: dollars for an hour, as it was offered; 0 if that is not known.
        asked: when it was asked for, in seconds since the epoch.
    """

    cluster: str
    host: str
    run_id: str
    launch: int
    price: float = Field(ge=0)
    asked: float


def note(home: Home, host: str, cluster: str, run_id: str, launch: int, price: float) -> None:
    """Write a file that says that a cluster is about to be rented, before the server is asked for
    it. A second call for the same cluster changes nothing.

    Args:
        host: the name of the host in config.toml.
        cluster: the name that the cluster will have at the server.
        launch: which start of the run it is for, counted from 1.
        price: dollars for an hour, as offered; 0 if that is not known.
    """
    path = home.hosts / "rented" / f"{cluster}.json"
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    values = {"cluster": cluster, "host": host, "run_id": run_id, "launch": launch}
    write_json(path, {**values, "price": price, "asked": time.time()})


def forget(home: Home, cluster: str) -> None:
    """Delete the file of a rented cluster, because it was given back. A second call changes
    nothing."""
    (home.hosts / "rented" / f"{cluster}.json").unlink(missing_ok=True)


def all_rented(home: Home, host: str = "") -> list[Rented]:
    """List every cluster that this home may have rented and not given back, by name; with `host`
    only those of that host. Damaged files are skipped."""
    clusters = []
    for path in sorted((home.hosts / "rented").glob("*.json")):
        try:
            cluster = Rented.model_validate(read_object(path))
        except ValidationError:
            continue
        if not host or cluster.host == host:
            clusters.append(cluster)
    return clusters


def shown(home: Home, host: str) -> dict[str, object]:
    """Return, for a listing that anybody may see, how many clusters were rented through a host,
    their price per hour in dollars, and for how many hours the first of them has been rented.
    Returns {} if none is known to be rented."""
    clusters = all_rented(home, host)
    if not clusters:
        return {}
    longest_hours = max(time.time() - cluster.asked for cluster in clusters) / 3600
    return {
        "rented": len(clusters),
        "costs_per_hour": round(sum(cluster.price for cluster in clusters), 4),
        "rented_hours": round(max(0.0, longest_hours), 2),
    }
