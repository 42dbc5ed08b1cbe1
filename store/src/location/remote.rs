//! The stores behind URLs.

use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path;
use object_store::{BackoffConfig, ObjectStore, ObjectStoreScheme, RetryConfig};

use super::StoreError;

/// How long a request to a remote store is repeated while the store is away or answers with 5xx. The library's own
/// limit of ten tries is over after three seconds; a minute's outage must cost no shard an attempt.
const OUTAGE_MAX: Duration = Duration::from_secs(300);

/// The longest pause between two tries, so that the end of an outage is noticed soon.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The store of a URL, with credentials and options from its cloud's usual environment, and the path inside it.
pub(super) fn store(url: &url::Url) -> object_store::Result<(Arc<dyn ObjectStore>, Path)> {
    let (scheme, path) = ObjectStoreScheme::parse(url)?;
    let retry = RetryConfig {
        max_retries: usize::MAX,
        retry_timeout: OUTAGE_MAX,
        backoff: BackoffConfig { max_backoff: PAUSE_MAX, ..BackoffConfig::default() },
    };
    let url = url.to_string();
    let store: Arc<dyn ObjectStore> = match scheme {
        ObjectStoreScheme::AmazonS3 => {
            let builder = AmazonS3Builder::from_env().with_url(url);
            Arc::new(builder.with_retry(retry).build()?)
        }
        ObjectStoreScheme::GoogleCloudStorage => {
            let builder = GoogleCloudStorageBuilder::from_env().with_url(url);
            Arc::new(builder.with_retry(retry).build()?)
        }
        ObjectStoreScheme::MicrosoftAzure => {
            let builder = MicrosoftAzureBuilder::from_env().with_url(url);
            Arc::new(builder.with_retry(retry).build()?)
        }
        _ => {
            return Err(StoreError::Generic { store: "URL", source: "no store of this scheme".into() });
        }
    };
    Ok((store, path))
}
