"""The page: what the server holds, to look at, and to change where that is allowed.

Plain files for a browser, as they lie here; all that they show is asked of the APIs beside them.
"""

from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

from kvkeep.server.schemas import Serving

_FOLDER = Path(__file__).parent / "files"
FILES = StaticFiles(directory=_FOLDER)
router = APIRouter(include_in_schema=False)


@router.get("/")
async def index() -> Response:
    return FileResponse(_FOLDER / "index.html", headers={"Cache-Control": "no-cache"})


@router.get("/favicon.ico")
async def icon() -> Response:
    return FileResponse(_FOLDER / "icon.svg", media_type="image/svg+xml")


@router.get("/v1/page")
async def settings(service: Serving) -> dict[str, Any]:
    """What the page may do, and of what model it tells."""
    return {"edits": service.edits, "model": service.name}
