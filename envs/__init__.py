"""Environments that ship with roll_like, each a plugin like any user's.

Importing this package registers them with Gymnasium; `roll_like.envs.make` does so by the entry-point
group `gymnasium.envs`.
"""

import gymnasium

_ENTRY_POINTS = {
    "roll_like/FrozenLake-v0": "envs.frozen_lake:make_frozen_lake",
    "roll_like/Sokoban-v0": "envs.sokoban:make_sokoban",
    "roll_like/CliffWalking-v0": "envs.cliff_walking:make_cliff_walking",
    "roll_like/Taxi-v0": "envs.taxi:make_taxi",
    "roll_like/QA-v0": "envs.qa:QA",
    "roll_like/ReasoningGym-v0": "envs.reasoning_gym:ReasoningGym",
    "roll_like/Tools-v0": "envs.tools:Tools",
    "roll_like/TextArena-v0": "envs.textarena:TextArena",
    "roll_like/TextWorld-v0": "envs.textworld:TextWorld",
}

for _id, _entry_point in _ENTRY_POINTS.items():
    gymnasium.register(_id, entry_point=_entry_point, disable_env_checker=True)
