"""Models that reward completions of groups that are written ahead: on the ranks that train, or on some of their own."""

import os
import re

import pytest
from selection import quick
from small_runs import small_job
from test_asynchronous_replay import SETTINGS, repeated, trained
from test_clock_runs import differences, differing_files
from test_clock_runs import run as run_by_clock
from test_own_texts import folders as folders  # a fixture
from test_placement_runs import check_ages, rank_of, run
from test_rewarding_pools import settings_of

from funrl.algos.recipes.dapo import dapo
from funrl.algos.recipes.remax import remax
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.mesh.launch import WorkerError, launch
from funrl.mesh.mesh import single
from funrl.trainer.placement.logged import read_groups
from funrl.trainer.settings.declaration import SettingsError
