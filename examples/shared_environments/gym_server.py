"""Serves a resource server of NeMo Gym: `python gym_server.py resources_servers.mcqa.app:MCQAResourcesServer 8124`.

For a Python of 3.12 or later with `nemo-gym`. NeMo Gym's own way is `ng_run`, which starts one environment for every
server and a head server.
"""

import importlib
import sys

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    host, port = "127.0.0.1", int(sys.argv[2])
    kind = getattr(importlib.import_module(module), name)
    head = BaseServerConfig(host=host, port=port + 1)
    server = kind(
        config=kind.model_fields["config"].annotation(name=name, host=host, port=port, entrypoint="app.py"),
        server_client=ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({})),
    )
    uvicorn.run(server.setup_webserver(), host=host, port=port, log_level="warning")
