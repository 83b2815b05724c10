import sys
from tests.ray.conftest import *
from tests.ray.test_sdk import OTHER_VERSION
import pytest
from tests.ray.jobs import *
def test_x(cluster, client):
    pass
    ended(client.submit(spec("true")))
    program = cluster.popen([sys.executable, "-c", OTHER_VERSION],  cwd="/")
    print(program.communicate())
    assert 0
