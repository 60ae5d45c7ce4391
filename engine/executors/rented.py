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
    """A cluster that was asked for.

    Attributes:
        cluster: its name at the server.
        host: in config.toml.
        price: of an hour, in dollars, as it was offered; 0 where nothing is known.
        asked: when, in seconds since the epoch.
    """

    cluster: str
    host: str
    run_id: str
    launch: int
    price: float = Field(ge=0)
    asked: float


def note(home: Home, host: str, cluster: str, run_id: str, launch: int, price: float) -> None:
    """Put on the disk that a cluster is about to be asked for; again changes nothing."""
    path = home.hosts / "rented" / f"{cluster}.json"
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    values = {"cluster": cluster, "host": host, "run_id": run_id, "launch": launch}
    write_json(path, {**values, "price": price, "asked": time.time()})


def forget(home: Home, cluster: str) -> None:
    """Note that a cluster was given back; again changes nothing."""
    (home.hosts / "rented" / f"{cluster}.json").unlink(missing_ok=True)


def all_rented(home: Home, host: str = "") -> list[Rented]:
    """Every cluster that may be there, of one host with `host`; damaged files are passed over."""
    found = []
    for path in sorted((home.hosts / "rented").glob("*.json")):
        try:
            each = Rented.model_validate(read_object(path))
        except ValidationError:
            continue
        if not host or each.host == host:
            found.append(each)
    return found


def shown(home: Home, host: str) -> dict[str, object]:
    """Count the clusters that a host has rented, and their price per hour in dollars, for a listing
    that anybody may see. Returns {} if none is known to be rented."""
    present = all_rented(home, host)
    if not present:
        return {}
    longest = max(time.time() - each.asked for each in present) / 3600
    return {
        "rented": len(present),
        "costs_per_hour": round(sum(each.price for each in present), 4),
        "rented_hours": round(max(0.0, longest), 2),
    }
