"""How rewards find the run's own judge model."""

#: What a reward writes in place of an address.
JUDGE_URL = "judge"
#: Environment variable of reward workers with the addresses of its replicas, separated by commas.
JUDGE_URLS_VARIABLE = "ROLL_LIKE_JUDGE_URLS"
