"""Drawings as SVG: the same bytes each time, light or dark as the reader prefers, wherever they are shown."""

from xml.sax.saxutils import escape

STYLE = (
    "text { fill: #1f2328 } .page { fill: #fff } @media (prefers-color-scheme: dark) "
    "{ text { fill: #e6edf3 } .page { fill: #0d1117 } }"
)
GRAY = "#888"  # of lines: visible on both pages


class Drawing:
    """Shapes on a page of `width` x `height` units, from its upper left corner."""

    def __init__(self, width: float, height: float):
        self.width, self.height, self.shapes = width, height, []

    def box(
        self,
        x: float,
        y: float,
        wide: float,
        tall: float,
        color: str,
        title: str = "",
        line: str = "",
    ) -> None:
        """title: what is shown under the pointer; line: a color of its outline."""
        outline = f' stroke="{line}"' if line else ""
        self.shapes.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{wide:.2f}" height="{tall:.2f}" fill="{color}"'
            f"{outline}><title>{escape(title)}</title></rect>"
        )

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", size: int = 13, color: str = ""
    ) -> None:
        fill = f' style="fill: {color}"' if color else ""
        self.shapes.append(
            f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-size="{size}"{fill}>'
            f"{escape(words)}</text>"
        )

    def path(self, places: str, color: str = GRAY, dashes: str = "", width: float = 1) -> None:
        """places: as SVG's attribute d has them."""
        more = f' stroke-dasharray="{dashes}"' * bool(dashes) + f' stroke-width="{width:g}"' * (
            width != 1
        )
        self.shapes.append(f'<path d="{places}" fill="none" stroke="{color}"{more}/>')

    def svg(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
                'font-family="sans-serif">',
                f"<style>{STYLE}</style>",
                '<rect class="page" width="100%" height="100%"/>',
                *self.shapes,
                "</svg>",
                "",
            ]
        )
