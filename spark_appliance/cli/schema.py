"""``schema``: JSON Schema of the files, for editors and other programs."""

from __future__ import annotations

import json

import click


@click.command()
@click.argument("what", type=click.Choice(["cluster", "plan", "profile"]), default="cluster")
def schema(what: str) -> None:
    """Print the JSON Schema of a file format (cluster file, plan or profile)."""
    from pydantic import BaseModel

    from spark_appliance.model.cluster import Cluster
    from spark_appliance.model.plan import Plan
    from spark_appliance.model.profile import Profile

    models: dict[str, type[BaseModel]] = {"cluster": Cluster, "plan": Plan, "profile": Profile}
    document = models[what].model_json_schema()
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    click.echo(json.dumps(document, indent=2, sort_keys=True))
