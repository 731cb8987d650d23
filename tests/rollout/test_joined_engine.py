"""The engine of joined generators, its office, and the weights that they pull."""

import dataclasses
import functools
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from funrl import trees
from funrl.asynchrony.leases import LeaseRule
from funrl.mesh.mesh import Mesh, single
from funrl.mesh.plan import slices, volume
from funrl.mesh.rules import GENERATE, STORED, fully_sharded, layouts
from funrl.mesh.text import parse
from funrl.models import decoder_model, with_fields
from funrl.processes.lines import LineError, Switchboard, call, new_secret
from funrl.rollout.certificate import SyncError
from funrl.rollout.engine import WeightSpec, complete
from funrl.rollout.joined.engine import JoinedEngine, NoGeneratorError, units_of
from funrl.rollout.joined.messages import Hello, Report, TrainerFacts
from funrl.rollout.joined.office import Office
from funrl.rollout.joined.shelf import Shelf, pieces_for, pull
from funrl.rollout.remote.digests import EngineDigests
from funrl.rollout.requests import Completion, requests_of
from funrl.rollout.sampling_parameters import Sampling
