package main

import (
	"context"
	"fmt"

	flowcontrol_v1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/kube-aggregator/pkg/apis/apiregistration"
	apiregistration_install "k8s.io/kube-aggregator/pkg/apis/apiregistration/install"
	apiregistration_validation "k8s.io/kube-aggregator/pkg/apis/apiregistration/validation"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/apps"
	_ "k8s.io/kubernetes/pkg/apis/apps/install"
	apps_validation "k8s.io/kubernetes/pkg/apis/apps/validation"
	"k8s.io/kubernetes/pkg/apis/batch"
	_ "k8s.io/kubernetes/pkg/apis/batch/install"
	batch_validation "k8s.io/kubernetes/pkg/apis/batch/validation"
	"k8s.io/kubernetes/pkg/apis/core"
	_ "k8s.io/kubernetes/pkg/apis/core/install"
	core_validation "k8s.io/kubernetes/pkg/apis/core/validation"
	"k8s.io/kubernetes/pkg/apis/flowcontrol"
	_ "k8s.io/kubernetes/pkg/apis/flowcontrol/install"
	flowcontrol_validation "k8s.io/kubernetes/pkg/apis/flowcontrol/validation"
	"k8s.io/kubernetes/pkg/apis/networking"
	_ "k8s.io/kubernetes/pkg/apis/networking/install"
	networking_validation "k8s.io/kubernetes/pkg/apis/networking/validation"
	"k8s.io/kubernetes/pkg/apis/policy"
	_ "k8s.io/kubernetes/pkg/apis/policy/install"
	policy_validation "k8s.io/kubernetes/pkg/apis/policy/validation"
	"k8s.io/kubernetes/pkg/apis/rbac"
	_ "k8s.io/kubernetes/pkg/apis/rbac/install"
	rbac_validation "k8s.io/kubernetes/pkg/apis/rbac/validation"
	"k8s.io/kubernetes/pkg/apis/storage"
	_ "k8s.io/kubernetes/pkg/apis/storage/install"
	storage_validation "k8s.io/kubernetes/pkg/apis/storage/validation"
	"k8s.io/kubernetes/pkg/capabilities"
)

// Privileged containers are a matter of the cluster (kube-apiserver --allow-privileged), not of a manifest.
func init() {
	capabilities.Setup(true, 0)
	// It has a scheme of its own in kube-apiserver.
	apiregistration_install.Install(legacyscheme.Scheme)
}

// Features of Kubernetes that are off unless somebody turns them on.
var options = map[string]bool{"WorkloadWithJob": false}

var strict = serializer.NewCodecFactory(legacyscheme.Scheme, serializer.EnableStrict).UniversalDeserializer()

// checkBuiltIn decodes an object of Kubernetes itself strictly, sets its defaults and validates it.
func checkBuiltIn(document []byte, object *unstructured.Unstructured) []error {
	versioned, _, err := strict.Decode(document, nil, nil)
	if err != nil {
		return []error{err}
	}
	group := object.GroupVersionKind().Group
	legacyscheme.Scheme.Default(versioned)
	internal, err := legacyscheme.Scheme.ConvertToVersion(versioned, runtime.InternalGroupVersioner)
	if err != nil {
		return []error{fmt.Errorf("group %q: %w", group, err)}
	}
	faults := legacyscheme.Scheme.Validate(context.Background(), options, versioned)
	faults = append(faults, validate(inNamespace(internal))...)
	all := make([]error, 0, len(faults))
	for _, fault := range faults {
		all = append(all, fault)
	}
	return all
}

// inNamespace puts an object that names no namespace into "default", as kubectl does.
func inNamespace(object runtime.Object) runtime.Object {
	switch object := object.(type) {
	case *core.Pod:
		if object.Namespace == "" {
			object.Namespace = "default"
		}
	case *core.PersistentVolumeClaim:
		if object.Namespace == "" {
			object.Namespace = "default"
		}
	case *core.ServiceAccount:
		if object.Namespace == "" {
			object.Namespace = "default"
		}
	case *rbac.Role:
		if object.Namespace == "" {
			object.Namespace = "default"
		}
	case *rbac.RoleBinding:
		if object.Namespace == "" {
			object.Namespace = "default"
		}
	}
	return object
}

func validate(object runtime.Object) field.ErrorList {
	pods := core_validation.PodValidationOptions{}
	switch object := object.(type) {
	case *core.Namespace:
		return core_validation.ValidateNamespace(object)
	case *core.ServiceAccount:
		return core_validation.ValidateServiceAccount(object)
	case *core.Service:
		// The API server gives addresses of its own; the one that says that there is none it copies.
		if object.Spec.ClusterIP == core.ClusterIPNone && object.Spec.ClusterIPs == nil {
			object.Spec.ClusterIPs = []string{core.ClusterIPNone}
		}
		return core_validation.ValidateServiceCreate(object)
	case *core.ConfigMap:
		return core_validation.ValidateConfigMap(object)
	case *core.PersistentVolumeClaim:
		return core_validation.ValidatePersistentVolumeClaim(
			object, core_validation.ValidationOptionsForPersistentVolumeClaimCreate())
	case *core.Secret:
		return core_validation.ValidateSecret(object)
	case *networking.NetworkPolicy:
		return networking_validation.ValidateNetworkPolicy(object, networking_validation.NetworkPolicyValidationOptions{})
	case *policy.PodDisruptionBudget:
		return policy_validation.ValidatePodDisruptionBudget(object, policy_validation.PodDisruptionBudgetValidationOptions{})
	case *core.Pod:
		return core_validation.ValidatePodCreate(object, pods)
	case *apps.StatefulSet:
		return apps_validation.ValidateStatefulSet(object, apps_validation.StatefulSetValidationOptions{}, pods)
	case *apps.DaemonSet:
		return apps_validation.ValidateDaemonSet(object, pods)
	case *apps.Deployment:
		return apps_validation.ValidateDeployment(object, pods)
	case *batch.CronJob:
		return batch_validation.ValidateCronJobCreate(object, pods)
	case *rbac.ClusterRole:
		return rbac_validation.ValidateClusterRole(object, rbac_validation.ClusterRoleValidationOptions{})
	case *rbac.ClusterRoleBinding:
		return rbac_validation.ValidateClusterRoleBinding(object)
	case *rbac.Role:
		return rbac_validation.ValidateRole(object)
	case *rbac.RoleBinding:
		return rbac_validation.ValidateRoleBinding(object)
	case *flowcontrol.FlowSchema:
		return flowcontrol_validation.ValidateFlowSchema(object)
	case *flowcontrol.PriorityLevelConfiguration:
		return flowcontrol_validation.ValidatePriorityLevelConfiguration(
			object, flowcontrol_v1.SchemeGroupVersion, flowcontrol_validation.PriorityLevelValidationOptions{})
	case *apiregistration.APIService:
		return apiregistration_validation.ValidateAPIService(context.Background(), object)
	case *storage.StorageClass:
		return storage_validation.ValidateStorageClass(object)
	case *storage.CSIDriver:
		return storage_validation.ValidateCSIDriver(object)
	case *storage.VolumeAttributesClass:
		return storage_validation.ValidateVolumeAttributesClass(object)
	default:
		// A kind that nobody checks would pass unseen.
		return field.ErrorList{field.InternalError(nil, fmt.Errorf("%T: no validation is called for this kind", object))}
	}
}
