import numpy as np
import pytest
from pydantic import TypeAdapter

from services.scheduler.problem.output_lengths import OutputLengths

RNG = np.random.default_rng(0)
SAMPLES = 400_000


def clipped_lognormal():
    return np.minimum(RNG.lognormal(np.log(700), 0.6, SAMPLES), 1500)


def histogram():
    return 100 + 50 * (RNG.choice(3, SAMPLES, p=[0.5, 0.3, 0.2]) + RNG.random(SAMPLES))


@pytest.mark.parametrize(
    ("stated", "drawn"),
    [
        ({"type": "lognormal", "median": 700, "sigma": 0.6, "max": 1500}, clipped_lognormal()),
        ({"type": "histogram", "start": 100, "width": 50, "fractions": [5, 3, 2], "max": 250}, histogram()),
        ({"type": "fixed", "length": 300}, np.full(10, 300.0)),
        ({"type": "empirical", "values": [1, 2, 6]}, np.array([1.0, 2.0, 6.0])),
    ],
)
def test_moments_and_the_longest_are_those_of_what_is_drawn(stated, drawn):
    lengths = TypeAdapter(OutputLengths).validate_python(stated)

    assert lengths.moments() == pytest.approx((drawn.mean(), (drawn**2).mean()), rel=0.01)
    assert lengths.longest == pytest.approx(drawn.max(), rel=0.01)
