"""One task of BFCL as an episode: its own handler asks the policy, its own checker rewards. `bfcl_agent.py CATEGORY`

Python of an environment that has bfcl-eval: README.md. Categories: those with one turn in Python, and `multi_turn_…`.
"""

import json
import os
import sys
import urllib.request
from copy import deepcopy

from bfcl import add_served
from bfcl_eval.constants.enums import Language, ReturnFormat
from bfcl_eval.eval_checker import eval_runner
from bfcl_eval.utils import is_multi_turn, is_relevance_or_irrelevance, load_dataset_entry, load_ground_truth_entry

add_served("policy")
category, seed = sys.argv[1], int(os.environ["ROLL_LIKE_SEED"])
tasks = load_dataset_entry(category)
task = tasks[seed % len(tasks)]
handler = eval_runner.get_handler("served")
result, _ = handler.inference(deepcopy(task), include_input_log=False, exclude_state_log=True)

if is_relevance_or_irrelevance(category):
    found = eval_runner._evaluate_single_relevance_entry(handler, task["id"], result, task, "served", category)
else:
    answer = next(each["ground_truth"] for each in load_ground_truth_entry(category) if each["id"] == task["id"])
    if is_multi_turn(category):
        found = eval_runner._evaluate_single_multi_turn_entry(
            handler, task["id"], result, answer, task, "served", category
        )
    else:
        found = eval_runner._evaluate_single_ast_entry(
            handler, task["id"], result, answer, task, "served", category, Language.PYTHON, ReturnFormat.PYTHON
        )
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
body = json.dumps({"reward": float(found["valid"]), "success": found["valid"]}).encode()
urllib.request.urlopen(urllib.request.Request(url + "/reward", body, {"Authorization": f"Bearer {key}"}))
