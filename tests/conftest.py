"""Four CPU devices for every test: what needs several of them runs on any machine."""

import jax

# It has to be said before the first array exists, hence here and not in a fixture.
jax.config.update("jax_num_cpu_devices", 4)


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write what the tests find into tests/golden, in place of comparing it",
    )
