//! Movies: what their files tell, and the items' table.

use laser_schema::Kind;
use laser_schema::entity::IdType;
use laser_store::Location;
use serde::Serialize;

use super::MovieLens;
use crate::Result;
use crate::table::{Written, int64, known, text, texts, write_entities};

#[derive(Debug, Serialize)]
pub(super) struct Movie {
    #[serde(skip)]
    pub(super) id: i64,
    #[serde(skip)]
    pub(super) ratings: u64,
    pub(super) title: String,
    pub(super) genres: Option<Vec<String>>,
    year: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) director: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) actors: Option<Vec<String>>,
}

impl MovieLens {
    pub(super) fn add_movie(&mut self, id: i64, title: &str, genres: Vec<String>) -> Result<(), String> {
        let position = u32::try_from(self.movies.len()).map_err(|e| e.to_string())?;
        if self.index.insert(id, position).is_some() {
            return Err(format!("movie {id} is there twice; remove one of the two"));
        }
        self.movies.push(Movie {
            id,
            ratings: 0,
            title: title.trim().to_owned(),
            genres: known(genres),
            year: year(title),
            director: None,
            actors: None,
        });
        Ok(())
    }

    pub(super) fn extend_movie(&mut self, id: i64, director: String, actors: &str) -> Result<(), String> {
        let position = self.position(id)?;
        let movie = &mut self.movies[position as usize];
        movie.director = Some(director).filter(|name| !name.is_empty());
        movie.actors = known(split(actors));
        Ok(())
    }

    pub(super) async fn write_items(&self, location: &Location) -> Result<Written> {
        let mut columns = vec![text("title"), texts("genres"), int64("year")];
        columns.extend(self.extended_columns());
        let rows = self.movies.iter().map(|movie| (movie.id, movie, movie.ratings));
        write_entities(location, (Kind::Item, IdType::Int64), columns, rows).await
    }
}

/// The names between bars.
pub(super) fn split(cell: &str) -> Vec<String> {
    let names = cell.split('|').map(str::trim).filter(|name| !name.is_empty());
    names.filter(|name| *name != "(no genres listed)").map(str::to_owned).collect()
}

/// The year that a title ends with: `Heat (1995)`, `Heat (1995) (V)`, or the first of `Dekalog (1989-1990)`.
fn year(title: &str) -> Option<u16> {
    title.rsplit('(').find_map(|part| {
        let digits = part.get(..4).filter(|d| d.bytes().all(|b| b.is_ascii_digit()))?;
        let ends = part[4..].starts_with([')', '-', '–']);
        digits.parse().ok().filter(|_| ends)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn years_are_parsed_from_titles() {
        let cases = [
            ("Heat (1995)", Some(1995)),
            ("Land (That Was) Time (1995) (V)", Some(1995)),
            ("Dekalog (1989–1990)", Some(1989)),
            ("2001: A Space Odyssey (1968) ", Some(1968)),
            ("Babylon 5", None),
            ("Nineteen (198)", None),
            ("Série (é)", None),
        ];
        for (title, expected) in cases {
            assert_eq!(year(title), expected, "{title}");
        }
    }
}
