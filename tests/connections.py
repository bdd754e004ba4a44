"""What the tests of queues and of the control channel share."""

import socket
import threading
import time

from asyncspec.wire import transport, waiting


def settle(*ends, until, seconds=5):
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline
        waiting.wait(ends, 0.01)
        for end in ends:
            if isinstance(end, transport.Outbox):
                end.flush()
            elif isinstance(end, transport.Inbox):
                len(end)


class CutConnection:
    """A proxy for an address whose connections can be cut, like in a network that fails for a moment."""

    def __init__(self, address):
        self._to = ("127.0.0.1", int(address.rsplit(":", 1)[1]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open, self._silent = [], []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                near, far = self._listener.accept()[0], socket.create_connection(self._to)
            except OSError:
                return
            self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source, sink):
        try:
            while data := source.recv(1000):
                if source not in self._silent:
                    sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):  # closing it would not wake a thread that reads from it
            self._shut(end)

    @staticmethod
    def _shut(end):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def cut(self):
        while self._open:
            self._shut(self._open.pop())

    def fall_silent(self):
        """Drop everything that is sent on the open connections from now on, without telling either end."""
        self._silent, self._open = [*self._silent, *self._open], []

    def close(self):
        self._listener.close()
        self.cut()
