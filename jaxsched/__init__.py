"""Explicit schedules for JAX: in-place updates that stay in place, in the order you declare."""

import jax as _jax_package

from jaxsched._jax import check_version as _check_version

_check_version(_jax_package.__version__)

from jaxsched._api import scheduled as scheduled
from jaxsched._before import before as before
from jaxsched._errors import CopyError as CopyError
from jaxsched._errors import CopyWarning as CopyWarning
from jaxsched._errors import CycleError as CycleError
from jaxsched._errors import ScheduleError as ScheduleError
from jaxsched._explain import explain as explain
from jaxsched._in_place import assert_in_place as assert_in_place
from jaxsched._report import Report as Report

__version__ = "0.1.0"
