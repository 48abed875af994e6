"""Names that rewards, their workers and the run's own judge model know each other by."""

#: The pool of all rewards that no other pool has.
DEFAULT_POOL = "rewards"

#: The environment's own reward among those of an episode.
RETURN = "return"

#: What a reward writes in place of an address.
JUDGE_URL = "judge"
#: Environment variable of reward workers with the addresses of its replicas, separated by commas.
JUDGE_URLS_VARIABLE = "ROLL_LIKE_JUDGE_URLS"
#: What a reward writes for the model that adapters are trained on, which the policy's engines have.
BASE_JUDGE_URL = "base"
#: Environment variable of reward workers with its address.
BASE_JUDGE_VARIABLE = "ROLL_LIKE_BASE_JUDGE_URL"
