//! Line charts as SVG documents of their own, for the benchmarks.

use anyhow::{Result, anyhow};
use plotters::element::DashedPathElement;
use plotters::prelude::*;

use crate::chart::failed;

/// Width and height in pixels, and the width of the names beside the plot.
const SIZE: (u32, u32) = (920, 440);
const NAMES: u32 = 180;

/// Pixels from one name to the next, and the length of the line beside it.
const NAME_HEIGHT: i32 = 16;
const NAME_LINE: i32 = 26;

/// Pixels of a dash and of the gap behind it, of the lines that have a colour for the second time, the third, ….
const DASHES: [(i32, i32); 3] = [(8, 5), (2, 4), (12, 3)];

/// Okabe and Ito's colours, which the colour-blind can tell apart.
const COLORS: [RGBColor; 8] = [
    RGBColor(0, 0, 0),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 158, 115),
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(204, 121, 167),
    RGBColor(128, 128, 128),
];

/// Lines over the same places of a category axis.
#[derive(Debug)]
pub struct LineChart {
    /// The heading.
    pub title: String,
    /// What the x axis says.
    pub x: &'static str,
    /// What the y axis says.
    pub y: &'static str,
    /// The places of the x axis.
    pub places: Vec<String>,
    /// Names and values, one a place.
    pub lines: Vec<(String, Vec<f64>)>,
}

impl LineChart {
    /// The chart as an SVG document.
    ///
    /// # Errors
    /// If there is nothing to draw.
    pub fn svg(&self) -> Result<String> {
        let mut svg = String::new();
        self.draw(SVGBackend::with_string(&mut svg, SIZE))?;
        Ok(svg)
    }

    fn draw(&self, backend: SVGBackend<'_>) -> Result<()> {
        let values = self.lines.iter().flat_map(|(_, values)| values);
        let highest = values.copied().fold(0.0, f64::max);
        if self.places.is_empty() || highest <= 0.0 {
            return Err(anyhow!("{}: there is nothing to draw", self.title));
        }
        let root = backend.into_drawing_area();
        root.fill(&WHITE).map_err(failed)?;
        let (plot, names) = root.split_horizontally(SIZE.0 - NAMES);
        let mut chart = ChartBuilder::on(&plot)
            .caption(&self.title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(52)
            .build_cartesian_2d(0..self.places.len().max(2) - 1, 0.0..1.1 * highest)
            .map_err(failed)?;
        let place = |index: &usize| self.places.get(*index).cloned().unwrap_or_default();
        chart
            .configure_mesh()
            .x_labels(self.places.len())
            .x_label_formatter(&place)
            .x_desc(self.x)
            .y_desc(self.y)
            .light_line_style(WHITE)
            .draw()
            .map_err(failed)?;
        for (index, (name, values)) in self.lines.iter().enumerate() {
            let style = COLORS[index % COLORS.len()].stroke_width(2);
            let y = NAME_HEIGHT * (2 + i32::try_from(index)?);
            let points = || values.iter().copied().enumerate();
            let sample = [(0, y), (NAME_LINE, y)];
            match (index / COLORS.len()).checked_sub(1) {
                None => {
                    chart.draw_series(LineSeries::new(points(), style)).map_err(failed)?;
                    names.draw(&PathElement::new(sample, style)).map_err(failed)?;
                }
                Some(round) => {
                    let (dash, gap) = DASHES[round % DASHES.len()];
                    chart.draw_series(DashedLineSeries::new(points(), dash, gap, style)).map_err(failed)?;
                    names.draw(&DashedPathElement::new(sample, dash, gap, style)).map_err(failed)?;
                }
            }
            let circles = points().map(|point| Circle::new(point, 3, style));
            chart.draw_series(circles).map_err(failed)?;
            let text = Text::new(name.clone(), (NAME_LINE + 8, y - 6), ("sans-serif", 12));
            names.draw(&text).map_err(failed)?;
        }
        root.present().map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart() -> LineChart {
        LineChart {
            title: "Users".into(),
            x: "batch",
            y: "speedup",
            places: vec!["1".into(), "64".into()],
            lines: vec![("plain".into(), vec![1.0, 1.0]), ("adaptive".into(), vec![2.5, 1.2])],
        }
    }

    #[test]
    fn a_chart_has_its_names_places_and_a_point_for_every_value() {
        let svg = chart().svg().unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        for text in ["Users", "batch", "speedup", "plain", "adaptive", "64"] {
            assert!(svg.contains(&format!("\n{text}\n")), "{text}: {svg}");
        }
        assert_eq!(svg.matches("<circle").count(), 4, "{svg}");
    }

    #[test]
    fn lines_of_one_colour_are_told_apart_by_their_dashes() {
        let lines = |number: usize| (0..number).map(|n| (format!("line {n}"), vec![1.0, 2.0])).collect();
        let strokes =
            |number: usize| LineChart { lines: lines(number), ..chart() }.svg().unwrap().matches("<polyline").count();
        let added = |number: usize| strokes(number) - strokes(number - 1);
        // The ninth line has the first one's colour again.
        assert_eq!(added(8), added(2));
        assert!(added(9) > 4 * added(8), "{} {}", added(9), added(8));
    }

    #[test]
    fn nothing_to_draw_is_an_error() {
        let empty = LineChart { lines: Vec::new(), ..chart() };
        assert!(empty.svg().is_err());
    }
}
