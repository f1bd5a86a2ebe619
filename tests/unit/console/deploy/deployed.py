"""What tests of deployments share: a problem's model, plans for it, and the files that deploy one."""

from pathlib import Path

from console.deploy.configurations import PLAIN_RUN
from console.deploy.deployment import deployment
from services.scheduler.cost_model.reference import CostModel
from tests.helpers.plans.problems import plan, problem

PLAN = plan([("l40s-0", 1, 3), ("l40s-0", 4, 1), ("l4-0", 2, 4)], [("a100-0", 4), ("l40s-0", 1)])
SPREAD = plan([("l4-0", 2, 4)], [("a100-0", 4), ("l40s-0", 8)])


def spread_model():
    """Of four unlike machines in two regions."""
    return CostModel(problem("tiny_04"))


def deployed(model, *, of=PLAN, run=PLAIN_RUN, address=None, folder=Path("/out"), engine="compose", **more):
    """The files by path."""
    return deployment(model, of, run=run, address=address, folder=folder, engine=engine, **more)
