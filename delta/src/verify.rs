//! A table against the manifests of complete nights.

use std::collections::{BTreeMap, BTreeSet};

use jiff::civil::Date;
use laser_store::data_set::ManifestError;

use crate::columns::Columns;
use crate::log::{File, Version, split};
use crate::night::Night;
use crate::table::{DeltaError, Table, expected};

impl Table {
    /// Compares the table with the manifests: each of its nights is one complete run with exactly the parts of its
    /// manifest, and no complete night that fits is lacking. Returns one line per fault, and `None` if there is no
    /// table.
    ///
    /// # Errors
    /// The store's, and a log that cannot be read.
    pub async fn verify(&self) -> Result<Option<Vec<String>>, DeltaError> {
        let Some(version) = self.read().await? else {
            return Ok(None);
        };
        let mut faults = Vec::new();
        let mut runs: BTreeMap<Date, BTreeSet<&str>> = BTreeMap::new();
        for path in version.files.keys() {
            if let Some((date, run, _)) = split(path) {
                runs.entry(date).or_default().insert(run);
            } else {
                faults.push(format!("{path}: in the table, but no part of Laser's"));
            }
        }
        for (date, runs) in runs {
            self.verify_night(&version, date, &runs, &mut faults).await?;
        }
        let mut columns = Columns::of(&version.schema());
        for night in self.lacking(&version).await? {
            let folder = night.folder();
            match self.admit(&mut columns, &night).await {
                Ok(()) => {
                    faults.push(format!("{folder}: complete, but not in the table; the next published night adds it"));
                }
                // The table cannot hold it, so it is not missed.
                Err(error) if error.is_damage() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Some(faults))
    }

    async fn verify_night(
        &self,
        version: &Version,
        date: Date,
        runs: &BTreeSet<&str>,
        faults: &mut Vec<String>,
    ) -> Result<(), DeltaError> {
        if runs.len() > 1 {
            let runs: Vec<&str> = runs.iter().copied().collect();
            faults.push(format!("dt={date}: the table has {} runs of it: {}", runs.len(), runs.join(", ")));
        }
        let of_night = match self.runs(date).await {
            Err(ManifestError::Location(error)) => return Err(error.into()),
            Err(error) => {
                faults.push(error.to_string());
                return Ok(());
            }
            Ok(of_night) => of_night,
        };
        if let Some(promoted) = of_night.promoted().filter(|run| !runs.contains(run)) {
            faults.push(format!(
                "dt={date}: run {promoted} is promoted, but not in the table; `laser outputs promote CONFIG \
                 {promoted}` puts it there"
            ));
        }
        let complete = Night::complete(&self.root, date, &of_night).await?;
        for run in runs {
            match complete.iter().find(|night| night.run == *run) {
                Some(night) => compare(version, night, faults),
                None => faults.push(format!(
                    "dt={date}/run={run}: in the table, but not complete; the command that began the run completes it"
                )),
            }
        }
        Ok(())
    }
}

fn compare(version: &Version, night: &Night, faults: &mut Vec<String>) {
    let folder = night.folder();
    let (found, expected) = (version.files_in(&folder), expected(night));
    let names: BTreeSet<&str> = found.keys().chain(expected.keys()).copied().collect();
    for name in names {
        let fault = match (found.get(name), expected.get(name)) {
            (Some(found), Some(expected)) if found == expected => continue,
            (Some(found), Some(expected)) => {
                format!("the table says {}, the manifest {}", size(found), size(expected))
            }
            (Some(_), None) => "in the table, but not in the manifest".to_owned(),
            (None, _) => "in the manifest, but not in the table".to_owned(),
        };
        faults.push(format!("{folder}/{name}: {fault}"));
    }
}

fn size(file: &File) -> String {
    let rows = file.rows.map_or("an unknown number of".to_owned(), |rows| rows.to_string());
    format!("{rows} rows in {} bytes", file.bytes)
}
