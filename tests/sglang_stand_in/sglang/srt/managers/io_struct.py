"""Requests, with the recorded fields."""

from sglang.recorded import RECORD, recorded_class

globals().update({name: recorded_class(name) for name in RECORD["classes"]})
