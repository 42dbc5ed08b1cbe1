//! What values of an input mean, whatever type their column has.

use serde_json::Number;

/// 2⁵³: up to here every whole number has an exact double, and it fits an i64.
const EXACT_MAX: f64 = 9_007_199_254_740_992.0;

/// The whole number that a number is, whatever type its column had.
#[expect(clippy::cast_possible_truncation, reason = "a whole number below 2^53")]
pub fn whole(number: &Number) -> Option<i64> {
    let is_whole = |float: &f64| float.fract() == 0.0 && float.abs() < EXACT_MAX;
    number.as_i64().or_else(|| number.as_f64().filter(is_whole).map(|float| float as i64))
}

/// ISO 8601 text in seconds, in UTC where it names no zone; or a number as text, as CSV has it.
pub fn seconds(text: &str) -> Option<f64> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite());
    let zoned = || text.parse::<jiff::Timestamp>().ok();
    let civil = || {
        let civil: jiff::civil::DateTime = text.parse().ok()?;
        Some(civil.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp())
    };
    number.or_else(|| Some(zoned().or_else(civil)?.as_microsecond() as f64 / 1e6))
}
