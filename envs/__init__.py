"""Environments that ship with roll_like, each a plugin like any user's.

Importing this package registers them with Gymnasium; `roll_like.envs.make` does so by the entry-point
group `gymnasium.envs`.
"""

import gymnasium

_ENTRY_POINTS = {
    "roll_like/FrozenLake-v0": "envs.frozen_lake:make_frozen_lake",
}

for _id, _entry_point in _ENTRY_POINTS.items():
    gymnasium.register(_id, entry_point=_entry_point, disable_env_checker=True)
