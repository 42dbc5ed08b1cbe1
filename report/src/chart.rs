//! Charts as the inside of an SVG element, in colours that follow the page's theme.
//!
//! plotters writes colours as numbers. Here each is a placeholder that becomes a CSS variable, so that one drawing
//! serves light, dark and print.

use std::fmt::Display;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde::{Deserialize, Serialize};

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
pub(crate) const SERIES: u8 = 6;

fn series(index: usize) -> RGBColor {
    let index = u8::try_from(index % usize::from(SERIES)).unwrap_or_default();
    RGBColor(160, 0, index)
}

/// What goes into an SVG element of this size.
#[derive(Debug, Serialize)]
pub(crate) struct Drawing {
    width: u32,
    height: u32,
    body: String,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn draw(height: u32, paint: impl FnOnce(&Area<'_>) -> Result<()>) -> Result<Option<Drawing>> {
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
    Ok(Some(Drawing { width: WIDTH, height, body }))
}

pub(crate) fn failed(error: impl Display) -> anyhow::Error {
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

/// Horizontal bars: for each label one of every series, which lie below each other. None if there is nothing to draw.
pub(crate) fn bars(rows: &[(String, Vec<f64>)], format: &dyn Fn(f64) -> String) -> Result<Option<Drawing>> {
    let spans = rows.iter().map(|(label, values)| {
        let spans = values.iter().map(|value| (0.0, *value, format(*value)));
        (label.clone(), spans.collect())
    });
    self::spans(&spans.collect::<Vec<_>>())
}

/// A label and where its bars begin and end, with what is written after each.
type Row = (String, Vec<(f64, f64, String)>);

/// Horizontal bars that begin anywhere. None if there is nothing to draw.
pub(crate) fn spans(rows: &[Row]) -> Result<Option<Drawing>> {
    const LABELS: i32 = 160;
    const VALUES: i32 = 70;
    const BAR: i32 = 14;
    const GAP: i32 = 12;
    let width = f64::from(i32::try_from(WIDTH)? - LABELS - VALUES);
    let ends = rows.iter().flat_map(|(_, bars)| bars.iter().map(|b| b.1));
    let most = ends.fold(0.0, f64::max);
    if most <= 0.0 {
        return Ok(None);
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Histogram {
    width: f64,
    bins: Vec<Bin>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Bin {
    from: f64,
    to: f64,
    /// One per series.
    counts: Vec<u64>,
}

impl Histogram {
    /// Bins of a round width, at most so many, over the values of all series.
    pub(crate) fn of(series: &[Vec<(f64, u64)>], bins_max: usize, least_width: f64) -> Option<Self> {
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
        let edge = |index: u32| start + f64::from(index) * width;
        let empty = |index| Bin { from: edge(index), to: edge(index + 1), counts: vec![0; series.len()] };
        let mut bins: Vec<Bin> = (0..).take(bin(high) + 1).map(empty).collect();
        let last = bins.len() - 1;
        for (index, values) in series.iter().enumerate() {
            for (value, count) in values {
                bins[bin(*value).min(last)].counts[index] += count;
            }
        }
        Some(Self { width, bins })
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
pub(crate) struct Axes<'a> {
    pub(crate) x: &'a str,
    pub(crate) y: &'a str,
    pub(crate) format_x: &'a dyn Fn(f64) -> String,
    pub(crate) format_y: &'a dyn Fn(f64) -> String,
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

/// Bars side by side in every bin. None if there is nothing to draw.
pub(crate) fn histogram(histogram: &Histogram, axes: &Axes<'_>) -> Result<Option<Drawing>> {
    let Histogram { width, bins } = histogram;
    let most = bins.iter().flat_map(|bin| &bin.counts).max().copied().unwrap_or_default();
    let (Some(first), Some(last), true) = (bins.first(), bins.last(), most > 0) else {
        return Ok(None);
    };
    // A bin of one whole number lies around it.
    let is_one = (width - 1.0).abs() < 1e-9;
    let shift = if is_one { 0.5 } else { 0.0 };
    draw(HEIGHT, |root| {
        let mut chart = axes!(root, axes, first.from - shift..last.to - shift, 0.0..1.05 * most as f64);
        let share = 0.86 * width / first.counts.len() as f64;
        for index in 0..first.counts.len() {
            let bars = bins.iter().filter(|bin| bin.counts[index] > 0);
            let bars = bars.map(|bin| {
                let left = bin.from - shift + 0.07 * width + index as f64 * share;
                let corners = [(left, 0.0), (left + share, bin.counts[index] as f64)];
                Rectangle::new(corners, series(index).filled())
            });
            chart.draw_series(bars).map_err(failed)?;
        }
        Ok(())
    })
}

/// Lines over 1, 2, 3 and so on. None if there is nothing to draw.
pub(crate) fn lines(lines: &[Vec<f64>], axes: &Axes<'_>) -> Result<Option<Drawing>> {
    let places = lines.iter().map(Vec::len).max().unwrap_or_default();
    let most = lines.iter().flatten().copied().fold(0.0, f64::max);
    if most <= 0.0 {
        return Ok(None);
    }
    draw(HEIGHT, |root| {
        let mut chart = axes!(root, axes, 1.0..(places.max(2) as f64), 0.0..1.05 * most);
        for (index, values) in lines.iter().enumerate() {
            let points = (1..).zip(values).map(|(at, value)| (f64::from(at), *value));
            // No line is grey.
            let style = series(index + usize::from(index > 0)).stroke_width(2);
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
        let drawing = bars(&[(label, vec![1.0, 0.5])], &|v| format!("{v}")).unwrap().unwrap();
        assert!(!drawing.body.contains("\"#"), "{}", drawing.body);
        assert!(drawing.body.contains("var(--s0)") && drawing.body.contains("var(--s1)"));
        assert!(drawing.body.contains("&lt;b&gt;&quot;#A00000&quot;"));
        assert!(!drawing.body.contains("svg"), "{}", drawing.body);
    }

    #[test]
    fn bars_are_as_long_as_their_values() {
        let rows = [("a".to_owned(), vec![10.0]), ("b".to_owned(), vec![5.0])];
        let body = bars(&rows, &|v| format!("{v}")).unwrap().unwrap().body;
        let widths = body.split(" width=\"").skip(1);
        let widths = widths.map(|rest| rest.split('"').next().unwrap());
        assert_eq!(widths.collect::<Vec<_>>(), ["230", "115"]);
    }

    #[test]
    fn bins_are_round_and_count_everything() {
        let series = [vec![(3.0, 2), (140.0, 1)], vec![(200.0, 5), (17.0, 1), (3.0, 1)]];
        let histogram = Histogram::of(&series, 24, 1.0).unwrap();
        assert!((histogram.width - 10.0).abs() < 1e-9 && histogram.bins[0].from.abs() < 1e-9);
        let sum = |series: usize| histogram.bins.iter().map(|bin| bin.counts[series]).sum::<u64>();
        assert_eq!([sum(0), sum(1)], [3, 7]);
        assert_eq!(histogram.bins[20].counts[1], 5);
        assert_eq!(histogram.bins.len(), 21);
        assert_eq!(Histogram::of(&[Vec::new()], 24, 1.0), None);
    }

    #[test]
    fn one_value_is_one_bin_and_of_nothing_there_is_no_drawing() {
        let histogram = Histogram::of(&[vec![(5.0, 3)]], 24, 1.0).unwrap();
        assert_eq!(histogram.bins, [Bin { from: 5.0, to: 6.0, counts: vec![3] }]);
        assert!(bars(&[], &|v| format!("{v}")).unwrap().is_none());
        assert!(bars(&[("a".into(), vec![0.0])], &|v| format!("{v}")).unwrap().is_none());
    }
}
