//! Numbers as a page shows them.

/// So many digits after the point, two if not told, or a dash for what was not measured.
pub(crate) fn fixed(value: Option<f64>, digits: Option<usize>) -> String {
    let digits = digits.unwrap_or(2);
    value.map_or_else(|| "–".to_owned(), |value| format!("{value:.digits$}"))
}

/// As a whole number, with commas between thousands.
pub(crate) fn whole(value: f64) -> String {
    let digits = format!("{:.0}", value.max(0.0));
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// For axes of whole numbers, whose other places are nothing.
pub(crate) fn whole_only(value: f64) -> String {
    match (value - value.round()).abs() < 1e-6 {
        // Adding nothing takes the sign from -0.
        true => format!("{:.0}", value.round() + 0.0),
        false => String::new(),
    }
}

/// For axes: 12k for 12,000.
pub(crate) fn short(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{}M", v / 1e6),
        v if v >= 1e4 => format!("{}k", v / 1e3),
        v if v.fract() == 0.0 => whole(v),
        v => format!("{v:.1}"),
    }
}

/// A share as a percentage with so many digits after the point, none if not told.
pub(crate) fn percent(share: f64, digits: Option<usize>) -> String {
    let digits = digits.unwrap_or(0);
    format!("{:.digits$} %", share * 100.0)
}

/// Seconds in the unit that fits.
pub fn duration(seconds: f64) -> String {
    if seconds < 60.0 {
        return match seconds {
            s if s < 0.1 => format!("{:.0} ms", s * 1e3),
            s if s < 10.0 => format!("{s:.1} s"),
            s => format!("{s:.0} s"),
        };
    }
    let minutes = (seconds / 60.0).floor();
    match minutes {
        m if m < 60.0 => format!("{m:.0} min {:.0} s", (seconds - m * 60.0).floor()),
        m => format!("{:.0} h {:.0} min", (m / 60.0).floor(), m % 60.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!([0.0, 999.4, 1_000.0, 1_234_567.0].map(whole), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(
            [0.0123, 2.25, 59.4, 61.0, 7_380.0].map(duration),
            ["12 ms", "2.2 s", "59 s", "1 min 1 s", "2 h 3 min"]
        );
        assert_eq!([0.5, 3.0, 9_000.0, 12_000.0, 2e6].map(short), ["0.5", "3", "9,000", "12k", "2M"]);
        assert_eq!((fixed(Some(1.0), None), fixed(None, Some(3))), ("1.00".to_owned(), "–".to_owned()));
        assert_eq!(percent(0.125, Some(1)), "12.5 %");
        assert_eq!([-1e-17, -0.0, 3.0, 2.5, -2.0].map(whole_only), ["0", "0", "3", "", "-2"]);
    }
}
