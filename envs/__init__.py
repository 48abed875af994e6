"""Environments that ship with roll_like, each a plugin like any user's.

Importing this package registers them with Gymnasium; `roll_like.make_env` does so by the entry-point
group `gymnasium.envs`.
"""

import gymnasium

_ENTRY_POINTS = {
    "roll_like/FrozenLake-v0": "roll_like.builtin.envs.frozen_lake:make_frozen_lake",
    "roll_like/Sokoban-v0": "roll_like.builtin.envs.sokoban:make_sokoban",
    "roll_like/CliffWalking-v0": "roll_like.builtin.envs.cliff_walking:make_cliff_walking",
    "roll_like/Taxi-v0": "roll_like.builtin.envs.taxi:make_taxi",
    "roll_like/QA-v0": "roll_like.builtin.envs.qa:QA",
    "roll_like/GEM-v0": "roll_like.builtin.envs.gem:GEM",
    "roll_like/OpenEnv-v0": "roll_like.builtin.envs.openenv:OpenEnv",
    "roll_like/ReasoningGym-v0": "roll_like.builtin.envs.reasoning_gym:ReasoningGym",
    "roll_like/SkyRLGym-v0": "roll_like.builtin.envs.skyrl_gym:SkyRLGym",
    "roll_like/Tools-v0": "roll_like.builtin.envs.tools:Tools",
    "roll_like/TextArena-v0": "roll_like.builtin.envs.textarena:TextArena",
    "roll_like/TextWorld-v0": "roll_like.builtin.envs.textworld:TextWorld",
}

for _id, _entry_point in _ENTRY_POINTS.items():
    gymnasium.register(_id, entry_point=_entry_point, disable_env_checker=True)
