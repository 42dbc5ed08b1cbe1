//! Charts as the inside of an SVG element, in colours that follow the page's theme.
//!
//! plotters writes colours as numbers. Here each is a placeholder that becomes a CSS variable, so that one drawing
//! serves light, dark and print.

use std::fmt::Display;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Width in pixels; the page scales drawings down on narrow screens, where letters of 12 stay legible.
const WIDTH: u32 = 460;

/// Height of those with axes.
const HEIGHT: u32 = 260;

/// plotters writes letters 1/1.24 as large: 12.
const FONT: (&str, u32) = ("sans-serif", 15);

/// Letters that fit into the label column of bars.
const LABEL_MAX: usize = 20;

const INK: RGBColor = RGBColor(1, 1, 1);
const MUTED: RGBColor = RGBColor(2, 2, 2);
const LINE: RGBColor = RGBColor(3, 3, 3);

/// Series are told apart by so many colours. The second is a grey, for what the first is compared with.
pub(super) const SERIES: u8 = 6;

/// The colour of a line: none is grey.
pub(super) fn line_color(index: usize) -> usize {
    index + usize::from(index > 0)
}

fn series(index: usize) -> RGBColor {
    let index = u8::try_from(index % usize::from(SERIES)).unwrap_or_default();
    RGBColor(160, 0, index)
}

/// What goes into an SVG element of this size.
#[derive(Debug, Clone)]
pub(super) struct Drawing {
    pub(super) width: u32,
    pub(super) height: u32,
    pub(super) body: String,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn draw(height: u32, paint: impl FnOnce(&Area<'_>) -> Result<()>) -> Result<Drawing> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        paint(&root)?;
        root.present().map_err(failed)?;
    }
    let inside = svg.split_once('>').map_or("", |(_, inside)| inside);
    let mut body = inside.trim_end().trim_end_matches("</svg>").to_owned();
    let series = (0..SERIES).map(|i| (series(usize::from(i)), format!("s{i}")));
    let fixed = [(INK, "ink"), (MUTED, "muted"), (LINE, "line")];
    let fixed = fixed.map(|(color, name)| (color, name.to_owned()));
    for (RGBColor(r, g, b), name) in series.chain(fixed) {
        // Quotes in texts are escaped, so only whole attributes are found.
        body = body.replace(&format!("\"#{r:02X}{g:02X}{b:02X}\""), &format!("\"var(--{name})\""));
    }
    Ok(Drawing { width: WIDTH, height, body })
}

fn failed(error: impl Display) -> anyhow::Error {
    anyhow!("the chart cannot be drawn: {error}")
}

fn text(content: String, at: (i32, i32), color: RGBColor, anchor: HPos) -> Text<'static, (i32, i32), String> {
    let style = FONT.into_font().color(&color).pos(Pos::new(anchor, VPos::Center));
    Text::new(content, at, style)
}

fn shortened(label: &str) -> String {
    match label.char_indices().nth(LABEL_MAX) {
        None => label.to_owned(),
        Some(_) => label.chars().take(LABEL_MAX - 1).chain(['…']).collect(),
    }
}

fn pixels(value: f64) -> i32 {
    #[expect(clippy::cast_possible_truncation, reason = "a place on a drawing of some hundred pixels")]
    let pixels = value.round() as i32;
    pixels
}

/// Horizontal bars: for each label one of every series, which lie below each other.
pub(super) fn bars(rows: &[(String, Vec<f64>)], format: &dyn Fn(f64) -> String) -> Result<Drawing> {
    let spans = rows.iter().map(|(label, values)| {
        let spans = values.iter().map(|value| (0.0, *value, format(*value)));
        (label.clone(), spans.collect())
    });
    self::spans(&spans.collect::<Vec<_>>())
}

/// A label and where its bars begin and end, with what is written after each.
type Row = (String, Vec<(f64, f64, String)>);

/// Horizontal bars that begin anywhere.
pub(super) fn spans(rows: &[Row]) -> Result<Drawing> {
    const LABELS: i32 = 160;
    const VALUES: i32 = 70;
    const BAR: i32 = 14;
    const GAP: i32 = 12;
    let width = f64::from(i32::try_from(WIDTH)? - LABELS - VALUES);
    let ends = rows.iter().flat_map(|(_, bars)| bars.iter().map(|b| b.1));
    let most = ends.fold(0.0, f64::max);
    if most <= 0.0 {
        return Err(anyhow!("there is nothing to draw"));
    }
    let bars: usize = rows.iter().map(|(_, bars)| bars.len()).sum();
    let height = i32::try_from(bars)? * BAR + i32::try_from(rows.len())? * GAP;
    draw(u32::try_from(height)?, |root| {
        let mut y = GAP / 2;
        for (label, bars) in rows {
            let middle = y + BAR * i32::try_from(bars.len())? / 2;
            let label = text(shortened(label), (LABELS - 10, middle), INK, HPos::Right);
            root.draw(&label).map_err(failed)?;
            for (index, (from, to, value)) in bars.iter().enumerate() {
                let at = |value: f64| LABELS + pixels(value / most * width);
                let (left, right) = (at(*from), at(*to).max(at(*from) + 1));
                let bar = Rectangle::new([(left, y + 1), (right, y + BAR - 1)], series(index).filled());
                root.draw(&bar).map_err(failed)?;
                let value = text(value.clone(), (right + 6, y + BAR / 2), MUTED, HPos::Left);
                root.draw(&value).map_err(failed)?;
                y += BAR;
            }
            y += GAP;
        }
        Ok(())
    })
}

/// Counts in bins of one width.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Histogram {
    /// Where the first bin begins.
    pub(super) start: f64,
    pub(super) width: f64,
    /// Counts of every series, a bin each.
    pub(super) counts: Vec<Vec<u64>>,
}

impl Histogram {
    /// Bins of a round width, at most so many, over the values of all series.
    pub(super) fn of(series: &[Vec<(f64, u64)>], bins_max: usize, least_width: f64) -> Option<Self> {
        let values = || series.iter().flatten().map(|(value, _)| *value);
        let (low, high) = values().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
        if !(low.is_finite() && high.is_finite()) {
            return None;
        }
        let width = round_width((high - low) / (bins_max - 1) as f64).max(least_width);
        let start = (low / width).floor() * width;
        let bin = |value: f64| {
            let bin = (value - start) / width;
            usize::try_from(pixels(bin.floor())).unwrap_or_default()
        };
        let bins = bin(high) + 1;
        let count = |values: &Vec<(f64, u64)>| {
            let mut counts = vec![0; bins];
            for (value, count) in values {
                counts[bin(*value).min(bins - 1)] += count;
            }
            counts
        };
        let counts = series.iter().map(count).collect();
        Some(Self { start, width, counts })
    }

    /// Where a bin begins and ends.
    pub(super) fn bin(&self, index: usize) -> (f64, f64) {
        let from = self.start + index as f64 * self.width;
        (from, from + self.width)
    }

    pub(super) fn bins(&self) -> usize {
        self.counts.first().map_or(0, Vec::len)
    }
}

/// 1, 2 or 5 times a power of ten, at least the width.
fn round_width(width: f64) -> f64 {
    if width <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(width.log10().floor());
    let factors = [1.0, 2.0, 5.0, 10.0].into_iter();
    let mut widths = factors.map(|factor| factor * power);
    widths.find(|round| *round >= width * 0.999).unwrap_or(width)
}

/// What the axes of a chart say.
pub(super) struct Axes<'a> {
    pub(super) x: &'a str,
    pub(super) y: &'a str,
    pub(super) format_x: &'a dyn Fn(f64) -> String,
    pub(super) format_y: &'a dyn Fn(f64) -> String,
}

macro_rules! axes {
    ($root:expr, $axes:expr, $x:expr, $y:expr) => {{
        let mut chart = ChartBuilder::on($root)
            .margin(6)
            .margin_right(16)
            .x_label_area_size(40)
            .y_label_area_size(56)
            .build_cartesian_2d($x, $y)
            .map_err(failed)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(8)
            .y_labels(5)
            .x_desc($axes.x)
            .y_desc($axes.y)
            .x_label_formatter(&|x| ($axes.format_x)(*x))
            .y_label_formatter(&|y| ($axes.format_y)(*y))
            .label_style(FONT.into_font().color(&MUTED))
            .axis_desc_style(FONT.into_font().color(&MUTED))
            .axis_style(LINE)
            .bold_line_style(LINE)
            .light_line_style(TRANSPARENT)
            .draw()
            .map_err(failed)?;
        chart
    }};
}

/// Bars side by side in every bin.
pub(super) fn histogram(histogram: &Histogram, axes: &Axes<'_>) -> Result<Drawing> {
    let most = histogram.counts.iter().flatten().max().copied();
    let most = most.filter(|most| *most > 0);
    let most = most.ok_or_else(|| anyhow!("there is nothing to draw"))? as f64;
    // A bin of one whole number lies around it.
    let is_one = (histogram.width - 1.0).abs() < 1e-9;
    let shift = if is_one { 0.5 } else { 0.0 };
    let (start, end) = (histogram.start - shift, histogram.bin(histogram.bins()).0 - shift);
    draw(HEIGHT, |root| {
        let mut chart = axes!(root, axes, start..end, 0.0..1.05 * most);
        let share = 0.86 * histogram.width / histogram.counts.len() as f64;
        for (index, counts) in histogram.counts.iter().enumerate() {
            let bars = counts.iter().enumerate().filter(|(_, count)| **count > 0);
            let bars = bars.map(|(bin, count)| {
                let left = histogram.bin(bin).0 - shift + 0.07 * histogram.width + index as f64 * share;
                let corners = [(left, 0.0), (left + share, *count as f64)];
                Rectangle::new(corners, series(index).filled())
            });
            chart.draw_series(bars).map_err(failed)?;
        }
        Ok(())
    })
}

/// Lines over 1, 2, 3 and so on.
pub(super) fn lines(lines: &[(String, Vec<f64>)], axes: &Axes<'_>) -> Result<Drawing> {
    let places = lines.iter().map(|(_, v)| v.len()).max().unwrap_or_default();
    let most = lines.iter().flat_map(|(_, v)| v.iter().copied());
    let most = most.fold(0.0, f64::max);
    if places == 0 || most <= 0.0 {
        return Err(anyhow!("there is nothing to draw"));
    }
    draw(HEIGHT, |root| {
        let mut chart = axes!(root, axes, 1.0..(places.max(2) as f64), 0.0..1.05 * most);
        for (index, (_, values)) in lines.iter().enumerate() {
            let points = (1..).zip(values).map(|(at, value)| (f64::from(at), *value));
            let style = series(line_color(index)).stroke_width(2);
            chart.draw_series(LineSeries::new(points, style).point_size(2)).map_err(failed)?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawings_have_theme_colours_only_and_escape_their_labels() {
        let label = "<b>\"#A00000\"".to_owned();
        let drawing = bars(&[(label, vec![1.0, 0.5])], &|v| format!("{v}")).unwrap();
        assert!(!drawing.body.contains("\"#"), "{}", drawing.body);
        assert!(drawing.body.contains("var(--s0)") && drawing.body.contains("var(--s1)"));
        assert!(drawing.body.contains("&lt;b&gt;&quot;#A00000&quot;"));
        assert!(!drawing.body.contains("svg"), "{}", drawing.body);
    }

    #[test]
    fn bars_are_as_long_as_their_values() {
        let rows = [("a".to_owned(), vec![10.0]), ("b".to_owned(), vec![5.0])];
        let body = bars(&rows, &|v| format!("{v}")).unwrap().body;
        let widths = body.split(" width=\"").skip(1);
        let widths = widths.map(|rest| rest.split('"').next().unwrap());
        assert_eq!(widths.collect::<Vec<_>>(), ["230", "115"]);
    }

    #[test]
    fn bins_are_round_and_count_everything() {
        let series = [vec![(3.0, 2), (140.0, 1)], vec![(200.0, 5), (17.0, 1), (3.0, 1)]];
        let histogram = Histogram::of(&series, 24, 1.0).unwrap();
        assert!((histogram.width - 10.0).abs() < 1e-9 && histogram.start.abs() < 1e-9);
        let sums: Vec<u64> = histogram.counts.iter().map(|c| c.iter().sum()).collect();
        assert_eq!(sums, [3, 7]);
        assert_eq!(histogram.counts[1][20], 5);
        assert_eq!(histogram.bins(), 21);
        assert_eq!(Histogram::of(&[Vec::new()], 24, 1.0), None);
    }

    #[test]
    fn one_value_is_one_bin_and_nothing_is_an_error() {
        let histogram = Histogram::of(&[vec![(5.0, 3)]], 24, 1.0).unwrap();
        assert_eq!(histogram.counts, [[3]]);
        assert_eq!(histogram.bin(0), (5.0, 6.0));
        assert!(bars(&[], &|v| format!("{v}")).is_err());
        assert!(bars(&[("a".into(), vec![0.0])], &|v| format!("{v}")).is_err());
    }
}
