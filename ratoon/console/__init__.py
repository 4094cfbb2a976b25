"""The console: the page at /, a client of the public HTTP API and of the stream of engine events.

The files beside this one are served as they are. There is no build step: sources are ES modules with types in comments,
and the libraries under vendor/ are single files whose versions and licences vendor/LICENSES.md lists.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
