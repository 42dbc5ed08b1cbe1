//! The page: the report's data in one template, with the filters that write numbers and the functions that draw charts.

use std::fmt::Display;

use anyhow::{Context, Result};
use minijinja::value::{Kwargs, ViaDeserialize};
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior, Value};

use crate::chart::{self, Axes, Drawing, Histogram};
use crate::data::Report;
use crate::format::{duration, fixed, percent, short, whole, whole_only};
use crate::gather::Stage;

/// Named `.html`, so that everything that is put into it is escaped.
const TEMPLATE: (&str, &str) = ("report.html", include_str!("report.html"));

/// The page of a night.
pub(crate) fn render(report: &Report<'_>) -> Result<String> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.add_filter("whole", whole);
    environment.add_filter("fixed", fixed);
    environment.add_filter("percent", percent);
    environment.add_filter("duration", duration);
    environment.add_function("bars", bars);
    environment.add_function("spans", spans);
    environment.add_function("histogram", histogram);
    environment.add_function("lines", lines);
    environment.add_global("series", chart::SERIES);
    environment.add_template(TEMPLATE.0, TEMPLATE.1)?;
    environment.get_template(TEMPLATE.0)?.render(report).context("the page")
}

/// How a chart writes its values.
fn format(name: &str) -> Result<fn(f64) -> String, Error> {
    match name {
        "whole" => Ok(whole),
        "duration" => Ok(duration),
        "fixed" => Ok(|value| fixed(Some(value), None)),
        "percent" => Ok(|share| percent(share, Some(1))),
        _ => Err(Error::new(ErrorKind::InvalidOperation, format!("{name:?} is no format of a chart"))),
    }
}

/// A bar per row and value: `label` names the rows' field of names, `values` those of values.
fn bars(rows: Vec<Value>, label: &str, values: Vec<String>, format_name: &str) -> Result<Value, Error> {
    let mut bars = Vec::new();
    for row in rows {
        let values =
            values.iter().map(|name| f64::try_from(row.get_attr(name)?)).collect::<Result<Vec<f64>, Error>>()?;
        bars.push((row.get_attr(label)?.to_string(), values));
    }
    drawn(chart::bars(&bars, &format(format_name)?))
}

/// A bar per stage, from its begin to its end.
fn spans(ViaDeserialize(stages): ViaDeserialize<Vec<Stage>>) -> Result<Value, Error> {
    let row = |stage: Stage| (stage.name, vec![(stage.from, stage.to, duration(stage.to - stage.from))]);
    drawn(chart::spans(&stages.into_iter().map(row).collect::<Vec<_>>()))
}

/// Counts by bin, with the axes' titles; `digits` are those of the values on the horizontal one.
fn histogram(
    ViaDeserialize(histogram): ViaDeserialize<Histogram>,
    x: &str,
    y: &str,
    options: Kwargs,
) -> Result<Value, Error> {
    let digits: Option<usize> = options.get("digits")?;
    options.assert_all_used()?;
    let format_x = |value: f64| digits.map_or_else(|| whole_only(value), |digits| fixed(Some(value), Some(digits)));
    drawn(chart::histogram(&histogram, &Axes { x, y, format_x: &format_x, format_y: &short }))
}

/// Lines of shares over 1, 2, 3 and so on, with the axes' titles.
fn lines(rows: Vec<Value>, x: &str, y: &str) -> Result<Value, Error> {
    let mut lines = Vec::new();
    for row in rows {
        let values = row.get_attr("values")?;
        lines.push(values.try_iter()?.map(f64::try_from).collect::<Result<Vec<f64>, Error>>()?);
    }
    drawn(chart::lines(&lines, &Axes { x, y, format_x: &whole_only, format_y: &|share| percent(share, None) }))
}

/// The drawing, whose texts plotters has escaped; nothing if there was nothing to draw.
fn drawn(drawing: Result<Option<Drawing>, impl Display>) -> Result<Value, Error> {
    let drawing = drawing.map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))?;
    Ok(drawing.map_or_else(|| Value::from(""), Value::from_serialize))
}
