"""A board as a picture: a colour for each tile, and its number where there is room."""

import base64
import colorsys
import io

from PIL import Image, ImageDraw, ImageFont

from sliding_puzzle.puzzle import Board

_GAP = (255, 255, 255)
_ROOM_FOR_A_NUMBER_PX = 24


def data_uri(board: Board, cell_px: int) -> str:
    """A PNG of `board.size * cell_px` pixels a side, as `data:image/png;base64,...`."""
    side_px = board.size * cell_px
    picture = Image.new("RGB", (side_px, side_px), _GAP)
    pen = ImageDraw.Draw(picture)
    for index, tile in enumerate(board.tiles):
        if not tile:
            continue
        top, left = index // board.size * cell_px, index % board.size * cell_px
        pen.rectangle(
            (left, top, left + cell_px - 1, top + cell_px - 1), fill=_colour(tile, len(board.tiles))
        )
        if cell_px >= _ROOM_FOR_A_NUMBER_PX:
            middle = (left + cell_px / 2, top + cell_px / 2)
            pen.text(middle, str(tile), "black", ImageFont.load_default(cell_px / 2), anchor="mm")
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def _colour(tile: int, tiles: int) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb((tile - 1) / (tiles - 1), 0.6, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)
