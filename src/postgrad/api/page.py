"""The web page of `postgrad view`, served from a thread of this process."""

import html
from pathlib import Path

from postgrad.net.server import ServerThread, address_of, listen
from postgrad.view import PORTS
from postgrad.view.auth import NOTEBOOKS
from postgrad.view.folder import Folder
from postgrad.view.server import make_server

HOST = "127.0.0.1"
FRAME_HEIGHT = 640  # pixels


class Page:
    """The page over a run folder, on this machine only, until stop() or the end of the process.

    A notebook of this machine shows the page in a frame, with its address below; elsewhere only
    the address is shown. Pages of other sites may not frame it.
    """

    def __init__(self, folder: Path, port: int | None = None) -> None:
        listener = listen(HOST, *(PORTS if port is None else (port,)))
        self.url = f"{address_of(listener)}/"
        server = make_server(Folder(folder), HOST, framed_by=NOTEBOOKS)
        self._thread = ServerThread(server, listener)

    def stop(self) -> None:
        """End the server and wait for its thread."""
        self._thread.stop()

    def __repr__(self) -> str:
        return self.url

    def _repr_html_(self) -> str:
        address = html.escape(self.url)
        frame = f'<iframe src="{address}" width="100%" height="{FRAME_HEIGHT}"></iframe>'
        return f'{frame}<br><a href="{address}" target="_blank">{address}</a>'
