//! The words that MovieLens' codes stand for, as GroupLens' READMEs give them.

/// Users' ages: the first year of each range of 1M, and the range.
const AGES: [(u8, &str); 7] =
    [(0, "under 18"), (18, "18-24"), (25, "25-34"), (35, "35-44"), (45, "45-49"), (50, "50-55"), (56, "56 or older")];

/// The occupations of 1M by code.
const OCCUPATIONS: [&str; 21] = [
    "other",
    "academic or educator",
    "artist",
    "clerical or admin",
    "college or grad student",
    "customer service",
    "doctor or health care",
    "executive or managerial",
    "farmer",
    "homemaker",
    "K-12 student",
    "lawyer",
    "programmer",
    "retired",
    "sales or marketing",
    "scientist",
    "self-employed",
    "technician or engineer",
    "tradesman or craftsman",
    "unemployed",
    "writer",
];

/// The areas of the United States by the first digit of a zip code.
const REGIONS: [&str; 10] = [
    "Northeast", "Mid-Atlantic", "Upper South", "Deep South", "Great Lakes", "Upper Midwest", "Central Plains",
    "South Central", "Mountain West", "Pacific",
];

pub(super) fn gender(code: &str) -> Result<&'static str, String> {
    match code {
        "F" => Ok("female"),
        "M" => Ok("male"),
        _ => Err(format!("gender {code:?} is neither F nor M")),
    }
}

pub(super) fn age(years: u8) -> &'static str {
    let below = AGES.partition_point(|&(first, _)| first <= years);
    AGES[below - 1].1
}

pub(super) fn occupation(code: usize) -> Result<&'static str, String> {
    let last = OCCUPATIONS.len() - 1;
    let name = OCCUPATIONS.get(code).copied();
    name.ok_or_else(|| format!("occupation {code} is unknown; expected 0 to {last}"))
}

/// `None` for what is no US zip code (100k has some of Canada).
pub(super) fn region(zip: &str) -> Option<&'static str> {
    let all_digits = zip.len() >= 5 && zip[..5].bytes().all(|b| b.is_ascii_digit());
    let first = zip.chars().next()?.to_digit(10)?;
    REGIONS.get(first as usize).copied().filter(|_| all_digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_fall_into_the_ranges_of_1m() {
        let cases = [(1, "under 18"), (17, "under 18"), (18, "18-24"), (49, "45-49"), (99, "56 or older")];
        for (years, expected) in cases {
            assert_eq!(age(years), expected, "{years}");
        }
    }
}
