"""A policy behind a websocket: for our client, for openpi's, and for whoever sends something else."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from engine.errors import UserError
from eval import protocol
from eval.client import Client
from eval.server import Background, ServerSettings
from tests.eval.stubs import Echo, observation


@pytest.fixture
def server() -> Iterator[Background]:
    with Background(Echo(), ServerSettings(port=0, max_message_mb=0.01)) as running:
        yield running


def test_the_handshake_carries_the_conventions_and_the_answer_what_was_asked(server: Background) -> None:
    with Client(server.address) as client:
        assert client.metadata["conventions"]["horizon"] == 4 and client.metadata["policy"] == "echo"
        actions = client.actions(observation(3.0), 3, seed=5, session="a", step=6)
        assert actions.dtype == np.float32 and np.array_equal(actions, np.tile(np.float32([3, 5, 6]), (4, 1)))


def test_errors_are_one_line_and_the_connection_goes_on(server: Background) -> None:
    with Client(server.address) as client:
        for value, words in (
            (-1, "ValueError: this state is not for me"),
            (-2, "not finite: nan at step 1, number 2"),
            (-3, "actions of 2 numbers; 3 are needed"),
        ):
            with pytest.raises(UserError, match=words):
                client.infer(observation(value))
        assert client.infer(observation(1))["actions"].shape == (4, 3)


def test_what_is_no_request_gets_a_line_and_the_server_stays(server: Background) -> None:
    bad = {"version": protocol.VERSION, "id": 1, "session": "s", "step": 0, "seed": 1}
    with connect(server.address, compression=None) as raw:
        raw.recv()
        for data, words in (
            (b"\xc1\xc1", "not msgpack"),
            ("hello", "must be binary"),
            (protocol.pack({"zooforge": bad | {"version": 2}}), "the client speaks version 2"),
            (protocol.pack({"zooforge": bad | {"seed": "x"}}), "zooforge.seed must be a whole number"),
            (protocol.pack({"zooforge": [1]}), "zooforge must be a map"),
        ):
            raw.send(data)
            reply = raw.recv()
            assert isinstance(reply, str) and words in reply and "\n" not in reply
        raw.send(b"x" * 20_000)
        with pytest.raises(ConnectionClosed) as closed:
            raw.recv()
        assert closed.value.rcvd and closed.value.rcvd.code == 1009
    with socket.create_connection(("127.0.0.1", server.port)) as plain:
        plain.sendall(b"\x00\xff nonsense\r\n\r\n")
    with Client(server.address) as client:
        assert client.limit == 10485
        with pytest.raises(UserError, match="takes at most 10485"):
            client.infer(observation() | {"observation/image": np.zeros((100, 100, 3), np.uint8)})
        assert client.infer(observation())["actions"].shape == (4, 3)


def test_a_token_is_asked_for_and_health_is_not_a_secret() -> None:
    with Background(Echo(), ServerSettings(port=0, token="secret")) as server:
        for token in (None, "wrong"):
            with pytest.raises(UserError, match="the token is missing or wrong"):
                Client(server.address, token)
        with Client(server.address, "secret") as client:
            assert client.infer(observation())["actions"].shape == (4, 3)
        health = http.client.HTTPConnection("127.0.0.1", server.port)
        health.request("GET", "/healthz")
        assert health.getresponse().status == 200


@pytest.mark.parametrize(
    "settings, words",
    [
        (ServerSettings(host="0.0.0.0"), "set token=SECRET"),
        (ServerSettings(host="::"), "set token=SECRET"),
        (ServerSettings(port=70000), "from 0 to 65535"),
        (ServerSettings(max_batch=0), "greater than 0"),
    ],
)
def test_settings_that_are_refused(settings: ServerSettings, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Background(Echo(), settings)


def test_a_port_in_use_and_nobody_there(server: Background) -> None:
    with (
        pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{server.port}"),
        Background(Echo(), ServerSettings(port=server.port)),
    ):
        pass
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(UserError, match="no policy server answers there"):
            Client(f"127.0.0.1:{free.getsockname()[1]}")


def test_no_more_clients_than_allowed() -> None:
    with (
        Background(Echo(), ServerSettings(port=0, max_clients=1)) as server,
        Client(server.address),
        pytest.raises(UserError, match="1 clients are connected"),
    ):
        Client(server.address)


def test_64_clients_are_served_in_batches_and_each_gets_its_own() -> None:
    policy = Echo(delay_s=0.01)
    with Background(policy, ServerSettings(port=0, max_batch=16, max_wait_ms=50)) as server:

        def talk(number: int) -> bool:
            with Client(server.address) as client:
                return all(
                    client.actions(observation(number), 3, number, "s", step)[2].tolist() == [number, number, step]
                    for step in range(5)
                )

        with ThreadPoolExecutor(64) as threads:
            assert all(threads.map(talk, range(64)))
    assert sum(policy.sizes) == 320 and max(policy.sizes) <= 16 and len(policy.sizes) < 160
    assert len(policy.forgotten) == 64


def test_a_bad_observation_does_not_spoil_its_batch() -> None:
    with Background(Echo(), ServerSettings(port=0, max_wait_ms=300)) as server:

        def ask(value: float) -> str:
            with Client(server.address) as client:
                barrier.wait()
                try:
                    return str(client.infer(observation(value))["actions"][0, 0])
                except UserError as error:
                    return str(error)

        from threading import Barrier

        barrier = Barrier(3)
        with ThreadPoolExecutor(3) as threads:
            answers = list(threads.map(ask, (2.0, -1.0, 4.0)))
    assert [answers[0], answers[2]] == ["2.0", "4.0"] and "not for me" in answers[1]


OPENPI = """
import sys, numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from openpi_client.action_chunk_broker import ActionChunkBroker
policy = WebsocketClientPolicy('127.0.0.1', int(sys.argv[1]), api_key='k')
assert policy.get_server_metadata()['conventions']['embodiment'] == 'stub_arm'
state = np.array([3.0, 1.0]); image = np.zeros((224, 224, 3), np.uint8)
sent = {'observation/state': state, 'observation/image': image, 'prompt': 'go'}
answer = policy.infer(sent)
assert answer['actions'].shape == (4, 3) and (answer['actions'][:, 0] == 3).all(), answer
try:
    policy.infer(sent | {'observation/state': np.array([-1.0, 0])})
except RuntimeError as error:
    assert 'not for me' in str(error)
else:
    raise SystemExit('no error')
broker = ActionChunkBroker(policy, action_horizon=4)
assert [broker.infer(sent)['actions'].shape for _ in range(5)] == [(3,)] * 5
print('fine')
"""


@pytest.fixture(scope="session")
def openpi_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """openpi's client wants an older numpy, so it has an environment of its own."""
    folder = tmp_path_factory.mktemp("openpi")
    uv = shutil.which("uv")
    if not uv:
        pytest.skip("uv is not here to install openpi-client with")
    words = [[uv, "venv", "-q", "--no-project", "--python", sys.executable, str(folder / "env")]]
    python = str(folder / "env" / "bin" / "python")
    words.append([uv, "pip", "install", "-q", "--python", python, "openpi-client==0.1.2", "typing_extensions"])
    for command in words:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"openpi-client cannot be installed: {done.stderr.strip()[-300:]}")
    return python


def test_openpis_own_client_is_served(openpi_python: str, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with Background(Echo(), ServerSettings(port=0, token="k")) as server:
        words = [openpi_python, "-c", OPENPI, str(server.port)]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "fine", done.stderr
